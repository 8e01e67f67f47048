"""A test marked `sweep(fast)` runs for every folder of transformers.models with routed experts; in
the fast suite for those of `fast` only, which are not looked for: that takes seconds.
"""

from __future__ import annotations

import pytest

from tests.sweep.discover import modelling_files


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("sweep")
    if marker is None:
        return
    (fast,) = marker.args
    is_fast_suite = "not slow" in metafunc.config.option.markexpr
    folders = [
        pytest.param(folder, marks=() if folder in fast else pytest.mark.slow)
        for folder in (fast if is_fast_suite else modelling_files())
    ]
    metafunc.parametrize("folder", folders)
