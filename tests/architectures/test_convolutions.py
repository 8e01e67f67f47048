"""Hybrid models in bfloat16 call no convolution of torch; with exact=True they call no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from moe_infinity import MoE
from moe_infinity.kernels.cpu.convolution import has_convolution
from tests.prefixes.tiny_models import save_tiny

pytestmark = pytest.mark.arithmetic

NAMES = ("qwen3_next", "qwen3_5_moe", "lfm2_moe", "nemotron_h", "jamba", "granitemoehybrid")
IDS = torch.tensor([[3, 9, 27, 81, 16, 48, 17, 51, 6, 18]])


class Calls(TorchFunctionMode):
    """Counts what reaches torch's conv1d."""

    num = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.num += func is torch.conv1d
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", NAMES)
def test_convolutions_of_a_hybrid_model_are_ours_unless_it_is_exact(tmp_path: Path, name: str):
    folder = save_tiny(name, tmp_path / "model")
    x = torch.randn(2, 9, 64).bfloat16()
    outs = []
    for exact in (False, True):
        with MoE(folder, dtype="bfloat16", exact=exact) as moe, Calls() as calls:
            moe.generate(input_ids=IDS, max_new_tokens=4, do_sample=False)
            assert (calls.num > 0) == exact
            owner = next(filter(has_convolution, moe.model.modules()))
            with torch.no_grad():
                out = owner(x)
        outs.append((out[0] if isinstance(out, tuple) else out).float())
    assert (outs[0] - outs[1]).abs().max() <= 0.03 * outs[1].abs().max()
