"""What the interpreter cannot tell: that kernels compile, load weights as wide as a GPU can, and
need few instructions for each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs triton")

# Of a weight, in the loop of gate and up, a fifth above the most of two generations of GPUs. A GPU
# that reads B bytes a second with M processors of F Hz keeps up while this is less than
# M * F * 128 * (bytes of a weight) / B: an RTX 3090 with 19 for one of 8 bits and 9.5 for 4 bits,
# an H100 with 8.8 and 4.4.
INSTRUCTIONS = {
    "bf16": 2.1, "int8": 8.5, "fp8": 13.3, "int4": 9.5, "mxfp4": 10.7, "nvfp4": 11.8, "gptq": 11.2,
    "awq": 15.3, "gptq any": 11.4, "ggml q8_0": 9.8, "ggml q4_k": 6.6, "ggml q6_k": 14.7,
    "ggml mxfp4": 18.7,
}  # fmt: skip


@pytest.fixture(scope="module", params=[80, 90])
def told(request) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.gpu.kernels.compile_kernels",
            str(request.param),
        ],
        cwd=Path(__file__).parents[4],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_weights_are_loaded_16_bytes_at_once(told):
    """An address that is read from memory loses what is known of its alignment, and then every
    byte would be loaded alone. Narrow loads are scales, zeros and single numbers. Blocks of GGML's
    begin at any byte.
    """
    assert told["fill"]["loads"]["128"] == 4
    for name, kernel in told.items():
        if name.startswith(("up ", "down ")) and " ggml " not in name:
            assert 16 in kernel["copied_bytes"] or kernel["loads"]["128"] >= 12, name
            narrow = {width: n for width, n in kernel["loads"].items() if width != "128"}
            assert sum(narrow.values()) <= 20, (name, narrow)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_weight_takes_few_instructions(told):
    """A wrong layout costs twice as many, and that sums cross threads for every weight."""
    for kind, most in INSTRUCTIONS.items():
        assert told[f"up 16 {kind}"]["instructions"] < most, kind


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tiles_are_products_of_matrices_whose_loads_are_begun_ahead(told):
    tiles = {n: k for n, k in told.items() if n.startswith(("up ", "down "))}
    assert {name.split()[1] for name in tiles} == {"16", "64"}
    for name, kernel in tiles.items():
        assert kernel["multiplies_matrices"], name
        assert kernel["loads_ahead"], name
    assert not [name for name, kernel in told.items() if kernel["spills"]]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_attention_copies_16_bytes_at_once_on_any_gpu(told):
    """99 KiB is the least shared memory that a program may have."""
    kernels = {name: kernel for name, kernel in told.items() if name.startswith("attend ")}
    assert kernels
    for name, kernel in kernels.items():
        assert kernel["multiplies_matrices"], name
        assert kernel["copied_bytes"] == [16], name
        assert kernel["shared_bytes"] <= 99 << 10, name


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_version_of_triton_chooses_how_sums_are_rounded(told):
    assert {kernel["fuses"] for kernel in told.values()} == {True}
