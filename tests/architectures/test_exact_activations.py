"""Every activation that a config can name, with the bits of transformers: torch rounds some of them
by where a number is in memory, so experts cannot all be activated by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.activations import ACT2FN

from moe_infinity import MoE
from moe_infinity.architectures.adapters import rounds_by_place

pytestmark = [pytest.mark.timeout(60), pytest.mark.arithmetic]
QUICK = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "mish", "silu", "relu2")
NAMES = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name in ACT2FN
    if name != "xielu"  # warns that a package is not installed
]
SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4,
    "initializer_range": 0.2, "eos_token_id": None,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_an_activation_in_float32_has_the_bits_of_stock(tmp_path, name):
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(hidden_act=name, **SIZES)).save_pretrained(tmp_path)
    stock = MixtralForCausalLM.from_pretrained(tmp_path)
    prompts = [torch.randint(3, 99, (2, length)) for length in (1, 9, 14)]
    with MoE(tmp_path, host_memory="40%", exact=True) as moe, torch.no_grad():
        for ids in prompts:
            assert torch.equal(moe.model(ids).logits, stock(ids).logits)
        decoded = [
            model.generate(
                prompts[1][:1],
                max_new_tokens=6,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            ).logits
            for model in (moe, stock)
        ]
    assert all(map(torch.equal, *decoded))


def test_only_what_is_rounded_in_two_ways_is_computed_in_steps():
    def gated(name: str) -> Any:
        activation = ACT2FN[name]
        return lambda x: activation(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]

    assert rounds_by_place(gated("quick_gelu"), dtype=torch.float32)
    assert not rounds_by_place(gated("relu"), dtype=torch.float32)
    assert not rounds_by_place(gated("silu"), dtype=torch.bfloat16)


def test_dense_float32_weights_lie_as_in_a_map_of_the_file(tmp_path):
    """The matrix library's sums for one token depend on where weights begin."""
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**SIZES)).save_pretrained(tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with MoE(tmp_path) as moe:
        of_stock = dict(stock.named_parameters())
        for name, weight in moe.model.named_parameters():
            assert weight.data_ptr() % 64 == of_stock[name].data_ptr() % 64, name
