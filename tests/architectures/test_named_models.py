"""The models the project names: 20 greedy tokens of tiny random ones, in the layout they are
published in, are those of stock transformers at three budgets.

Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2, DeepSeek-V3, OLMoE and gpt-oss are in
test_architectures.py, Arctic and Grok in test_remote_code.py, Switch and NLLB in
test_encoder_decoder.py.
"""

from __future__ import annotations

import pytest
import torch

from moe_infinity import MoE
from tests.closeness import distance, logits_of_steps
from tests.sweep import discover, tiny

pytestmark = pytest.mark.arithmetic

NAMED = {
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Glm4MoeForCausalLM": "glm4_moe",
    "DbrxForCausalLM": "dbrx",
}
TOLERANCE = 1e-4  # of the largest logit, float32: sums of at most 96 numbers in another order
BUDGETS = ["4.2%", "50%", "100%"]  # the first is one slot: 24 to 32 experts in all


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", NAMED)
def test_20_greedy_tokens_are_those_of_stock_at_three_budgets(name, tmp_path):
    (architecture,) = [a for a in discover.architectures_in(NAMED[name]) if a.name == name]
    tiny.tiny_model(architecture).save_pretrained(tmp_path)
    arguments = {"max_new_tokens": 20, "do_sample": False, "use_cache": True}
    stock = architecture.model_class.from_pretrained(tmp_path, dtype="auto")
    expected = stock.generate(tiny.PROMPT, **arguments)
    assert len(expected[:, tiny.PROMPT.shape[1] :].unique()) > 4
    for budget in BUDGETS:
        with MoE(tmp_path, host_memory=budget, exact=True) as moe:
            assert torch.equal(moe.generate(tiny.PROMPT, **arguments), expected), budget
            capacity = moe.report().tiers[0].capacity
            moe.check_invariants()
        assert (capacity == 1) == (budget == BUDGETS[0])


def test_llama_4_is_near_stock_at_three_budgets(tmp_path):
    """Stock gives every token to every expert, most of them times zero; ours get those routed to
    them, so that their products have fewer rows."""
    architectures = discover.architectures_in("llama4")
    (architecture,) = [a for a in architectures if a.name == "Llama4ForCausalLM"]
    tiny.tiny_model(architecture).save_pretrained(tmp_path)
    stock = architecture.model_class.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.cat([tiny.PROMPT, tiny.PROMPT.flip(1)], dim=1)
    expected = logits_of_steps(stock, ids, tiny.PROMPT.shape[1])
    for budget in BUDGETS:
        with MoE(tmp_path, host_memory=budget, dtype="float32") as moe:
            found = logits_of_steps(moe.model, ids, tiny.PROMPT.shape[1])
            assert distance(found, expected) < TOLERANCE, budget
            moe.check_invariants()
