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

# Of a weight, for up and down, a fifth above the most of two generations of GPUs; for down all of
# its code, as a program reads its rows at once. A GPU that reads B bytes a second with M processors
# of F Hz keeps up while this is less than M * F * 128 * (bytes of a weight) / B: an RTX 3090 with
# 19 for one of 8 bits and 9.5 for 4 bits, an H100 with 8.8 and 4.4.
INSTRUCTIONS = {
    "int8": (6.3, 8.2), "fp8": (9.9, 13.1), "int4": (6.6, 5.8), "mxfp4": (8.6, 7.6),
    "gptq": (5.4, 9.5), "awq": (5.3, 6.6), "gptq any": (10.2, 9.5),
    "ggml q8_0": (11, 19.6), "ggml q4_k": (6.4, 11.6), "ggml q6_k": (13.7, 27.2),
    "ggml mxfp4": (20.9, 31.1),
}  # fmt: skip


@pytest.fixture(scope="module", params=[80, 90])
def told(request) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.experimental.gpu.kernels.compile_kernels",
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
@pytest.mark.timeout(600)
def test_weights_are_loaded_16_bytes_at_once(told):
    """An address that is read from memory loses what is known of its alignment, and then every
    byte would be loaded alone. Narrow loads are scales, zeros and single numbers. Blocks of GGML's
    begin at any byte.
    """
    assert told["fill"]["loads"]["128"] == 4
    for name, kernel in told.items():
        widths = kernel["loads"]
        if name.startswith(("up ", "down ")) and " ggml " not in name:
            assert widths.pop("128") >= 2, name
            few = {"gptq any": 80, "awq": 80, "gptq": 20}.get(name.partition(" ")[2], 12)
            assert sum(widths.values()) <= few, (name, widths)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_weight_takes_few_instructions(told):
    """A wrong layout costs twice as many, and that sums cross threads for every weight."""
    for kind, limits in INSTRUCTIONS.items():
        for part, most in zip(("up", "down"), limits, strict=True):
            assert told[f"{part} {kind}"]["instructions"] < most, (part, kind)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tiles_are_products_of_matrices_whose_loads_are_begun_ahead(told):
    tiles = {name: kernel for name, kernel in told.items() if "_tile " in name}
    assert {name.split()[1] for name in tiles} == {"16", "32", "64"}  # 32: of routers
    for name, kernel in tiles.items():
        assert kernel["multiplies_matrices"], name
        assert kernel["loads_ahead"], name
    assert not [name for name, kernel in told.items() if kernel["spills"]]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_attention_copies_16_bytes_at_once_on_any_gpu(told):
    """Where the cache allows it. 99 KiB is the least shared memory that a program may have."""
    kernels = {name: kernel for name, kernel in told.items() if name.startswith("attend ")}
    assert kernels
    for name, kernel in kernels.items():
        assert kernel["multiplies_matrices"], name
        assert kernel["copied_bytes"] == [16], name
        assert kernel["shared_bytes"] <= 99 << 10, name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_version_of_triton_chooses_how_sums_are_rounded(told):
    assert {kernel["fuses"] for kernel in told.values()} == {True}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_numbers_that_small_are_not_lost(told):
    """Weights are read as denormal float32s, which arithmetic may take for 0: that of erf does."""
    lost = {name for name, kernel in told.items() if kernel["loses_denormals"]}
    assert lost == {"up gelu", "up_tile 16 gelu", "up_tile 64 gelu"}
