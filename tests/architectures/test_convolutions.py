"""Hybrid models in bfloat16 call no convolution of torch; with exact=True they call no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from moe_infinity import MoE
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
    logits = {}
    for exact in (False, True):
        with MoE(folder, dtype="bfloat16", exact=exact) as moe, Calls() as calls:
            out = moe.generate(
                input_ids=IDS,
                attention_mask=torch.ones_like(IDS),
                max_new_tokens=4,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        assert (calls.num > 0) == exact
        logits[exact] = torch.cat(out.logits)[:1].float()  # of one and the same prompt
    difference = (logits[True] - logits[False]).abs().max()
    assert difference <= 0.02 * logits[True].abs().max()
