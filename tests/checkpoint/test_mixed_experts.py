"""Experts of one layer that are stored in several ways: another dtype for some, or packed beside
plain. They load, converted to the model's dtype, as in stock transformers.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_infinity import CheckpointError, MoE
from tests.quantized_checkpoints import build
from tests.slow_unpack import dequantized

pytestmark = [pytest.mark.timeout(120)]
IDS = torch.tensor([[5, 9, 77, 3, 11, 20, 31]])
ODD_EXPERT = ".layers.0.mlp.experts.3."


def change(folder, edit):
    """Rewrite the weights of a checkpoint."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file(edit(weights), file, {"format": "pt"})
    return folder


def stored_as(weights, dtype, names=("",), expert=ODD_EXPERT):
    return {
        name: w.to(dtype) if expert in name and name.endswith(names) else w
        for name, w in weights.items()
    }


@torch.no_grad()
def assert_same_logits(folder, plain, **options):
    stock = transformers.AutoModelForCausalLM.from_pretrained(plain, **options)
    for host_memory in ("10%", "100%"):
        with MoE(folder, host_memory=host_memory, exact=True, **options) as moe:
            assert torch.equal(moe.model(IDS).logits, stock(IDS).logits), host_memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("odd", "names", "expert"),
    [
        (torch.float32, ("",), ODD_EXPERT),
        (torch.float16, ("up_proj.weight",), ODD_EXPERT),
        (torch.float32, ("down_proj.weight",), ".layers.1.mlp.experts.0."),
    ],
)
def test_an_expert_of_another_dtype(tiny_checkpoint, copy_of, dtype, odd, names, expert):
    def edit(weights):
        return stored_as({name: w.bfloat16() for name, w in weights.items()}, odd, names, expert)

    folder = change(copy_of(tiny_checkpoint), edit)
    assert_same_logits(folder, folder, dtype=dtype)


@pytest.mark.parametrize("name", ["awq", "int4 symmetric", "fp8", "gptq_v2 with act-order"])
def test_a_plain_expert_among_packed_ones(tmp_path, name):
    folder = build(name, tmp_path / "packed")
    plain = dequantized(folder, tmp_path / "plain")
    whole = load_file(plain / "model.safetensors")

    def leave_plain(weights):
        left = {name: w for name, w in weights.items() if ODD_EXPERT not in name}
        return left | {name: w for name, w in whole.items() if ODD_EXPERT in name}

    change(folder, leave_plain)
    assert_same_logits(folder, plain, dtype="bfloat16")


@pytest.mark.parametrize("odd", ["int8", "shape"])
def test_an_expert_that_is_no_expert_of_its_layer_is_named(tiny_checkpoint, copy_of, odd):
    def edit(weights):
        if odd == "int8":
            return stored_as(weights, torch.int8, ("down_proj.weight",))
        return {
            name: w[:-1].contiguous() if ODD_EXPERT in name and "up_proj" in name else w
            for name, w in weights.items()
        }

    folder = change(copy_of(tiny_checkpoint), edit)
    with pytest.raises(
        CheckpointError, match=r"experts\.3\.(down|up)_proj.*\n.*one shape"
    ) as error:
        MoE(folder)
    assert "model.safetensors" in str(error.value)
