"""What the interpreter cannot tell: that kernels compile, and load weights as wide as a GPU can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs triton")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 90])
def test_weights_are_loaded_16_bytes_at_once(capability):
    """An address that is read from memory loses what is known of its alignment, and then every
    byte would be loaded alone. Narrow loads are scales, zeros and single numbers.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.numerics.compile_kernels", str(capability)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        check=True,
    )
    loads = json.loads(done.stdout)
    assert loads["fill"]["128"] == 4
    for name, widths in loads.items():
        if name.startswith(("up ", "down ")):
            assert widths.pop("128") >= 2, name
            few = {"gptq any": 80, "gptq": 20, "awq": 20}.get(name.partition(" ")[2], 12)
            assert sum(widths.values()) <= few, (name, widths)
