"""What only the compiled kernels show: `make test-compiled`."""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs triton")

from moe_infinity.gpu.kernels import resolve as triton_resolve
from tests.gpu.device_tables import World
from tests.gpu.kernels.compiled import Launcher
from tests.gpu.kernels.ptx_memory import RaceError

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(
        os.environ["TRITON_INTERPRET"] == "1" or torch.cuda.is_available(),
        reason="for make test-compiled",
    ),
]


def state_after_two_rows() -> dict[str, object]:
    """Misses that take slots, with one that the row uses."""
    torch.manual_seed(0)
    world = World("cpu", layers=2, experts=16, slots=6)
    world.table.upload_scores(np.random.default_rng(0).random(world.table.scores_LHE.shape))
    for row in (0, 1):
        triton_resolve.resolve(world.table, row, torch.randint(0, 16, (1, 8)))
    return world.state()


def test_resolve_needs_its_barriers(monkeypatch):
    """Without any one of them warps would race; but for one, that only more pairs need."""
    expected, num_barriers = state_after_two_rows(), 0

    def count(_: Launcher, ptx: str) -> str:
        nonlocal num_barriers
        num_barriers = len(re.findall(r"bar\.sync\s", ptx))
        return ptx

    monkeypatch.setattr(Launcher, "change", count)
    assert state_after_two_rows() == expected
    needed = 0
    for left_out in range(num_barriers):

        def without(_: Launcher, ptx: str, left_out: int = left_out) -> str:
            *before, after = re.split(r"bar\.sync\s+0;", ptx, maxsplit=left_out + 1)
            return "bar.sync 0;".join(before) + after

        monkeypatch.setattr(Launcher, "change", without)
        try:
            assert state_after_two_rows() == expected
        except RaceError:
            needed += 1
    assert num_barriers - 1 <= needed <= num_barriers
    assert needed >= 9
