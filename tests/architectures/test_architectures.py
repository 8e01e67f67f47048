"""Offloading never changes the result: tiny random models of seven architectures, saved in their
own checkpoint layout, against stock transformers, bit for bit, at every budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from moe_infinity import MoE, UnsupportedModelError
from moe_infinity.engine.hooks import EngineLayer

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(5)]

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,  # nothing ends a sequence early
    "pad_token_id": 0,
}
LATENT: dict[str, Any] = {  # DeepSeek's attention
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 1,
    },
    "Qwen3Moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "head_dim": 16,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "DeepseekV2": LATENT | {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"},
    "DeepseekV3": LATENT | {"n_group": 4, "topk_group": 2},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "GptOss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
BUDGETS = ["6.3%", "50%", "100%"]  # the first is one slot: 16 to 24 experts in all
PROMPT = torch.arange(3, 3 + 26).view(2, 13) * 4 % 128  # two sequences


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request, tmp_path_factory) -> Path:
    """A tiny random bf16 model in the layout its architecture is published in."""
    config_class = getattr(transformers, f"{request.param}Config")
    model_class = getattr(transformers, f"{request.param}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(config_class(**SMALL | ARCHITECTURES[request.param]))
    with torch.no_grad():
        for param in model.parameters():  # large enough that logits differ clearly between tokens
            if param.ndim > 1:
                param.normal_(std=0.15)
    folder = tmp_path_factory.mktemp(request.param)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@torch.no_grad()
def prefill_and_generate(model) -> tuple[torch.Tensor, ...]:
    """Logits of every prompt token, 10 greedy tokens, and the logits each was chosen from."""
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    out = model.generate(
        **inputs,
        max_new_tokens=10,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return model(**inputs).logits, out.sequences, torch.stack(out.logits)


@pytest.mark.sample(3)
@pytest.mark.grid
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_prefill_and_greedy_tokens_are_bitwise_those_of_stock(checkpoint, implementation):
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype="auto", experts_implementation=implementation
    )
    assert stock.dtype == torch.bfloat16
    expected = prefill_and_generate(stock)
    assert expected[1].shape == (2, 13 + 10)
    for budget in BUDGETS:
        with MoE(checkpoint, host_memory=budget, experts_implementation=implementation) as moe:
            found = prefill_and_generate(moe.model)
            moe.check_invariants()
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs), (budget, (ours - theirs).abs().max())


@torch.no_grad()
def test_a_block_asked_with_its_own_residual_answers_with_its_routing(checkpoint, monkeypatch):
    """So what it answers early differs only because the residual has not got there yet."""
    answers = []
    moe_layer = EngineLayer.__call__

    def asked_first(self, x_TD, top_k_index_TK, top_k_weights_TK):
        router = self.early_router
        if not router.is_asking:
            answer = router.ask(self.moe_layer_idx)
            if answer is not None:
                answers.append((answer == top_k_index_TK.numpy()).all())
        return moe_layer(self, x_TD, top_k_index_TK, top_k_weights_TK)

    options = {"host_memory": "100%", "prefetch": True, "early_router": True, "exact": True}
    with MoE(checkpoint, options) as moe:  # exact: a block that is asked has torch's arithmetic
        prefill_and_generate(moe.model)  # finds the norms
        monkeypatch.setattr(EngineLayer, "__call__", asked_first)
        inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
        moe.generate(**inputs, max_new_tokens=4, do_sample=False)
        num_moe_layers = len(moe.request_eams()[0].decode)
    assert answers == [True] * 4 * num_moe_layers


@pytest.mark.sample(3)
def test_asking_early_changes_no_token(checkpoint):
    with MoE(checkpoint, host_memory="50%") as moe:
        expected = prefill_and_generate(moe.model)
    with MoE(checkpoint, host_memory="50%", prefetch=True, early_router=True) as moe:
        for ours, theirs in zip(prefill_and_generate(moe.model), expected, strict=True):
            assert torch.equal(ours, theirs)
        moe.check_invariants()


def test_eager_and_grouped_mm_are_different_arithmetic(checkpoint):
    """Otherwise comparing with each of them would prove less than it seems to."""
    with torch.no_grad():
        logits = [
            transformers.AutoModelForCausalLM.from_pretrained(
                checkpoint, dtype="auto", experts_implementation=name
            )(PROMPT).logits
            for name in ("eager", "grouped_mm")
        ]
    assert not torch.equal(*logits)


def test_a_static_cache_gives_the_tokens_of_stock_and_leaves_padding_out(checkpoint):
    stock = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    mask = torch.ones_like(PROMPT)
    mask[0, :4] = 0
    arguments = {
        "attention_mask": mask,
        "max_new_tokens": 6,
        "do_sample": False,
        "cache_implementation": "static",
    }
    expected = stock.generate(PROMPT, **arguments)
    with MoE(checkpoint, host_memory="50%", exact=True) as moe:
        assert torch.equal(moe.generate(PROMPT, **arguments), expected)
        top_k = moe.model.config.num_experts_per_tok
        eams = moe.request_eams()
    assert [eam.prefill[0].sum() for eam in eams] == [9 * top_k, 13 * top_k]
    assert [eam.decode[0].sum() for eam in eams] == [5 * top_k, 5 * top_k]


def test_a_model_without_its_experts_can_be_neither_saved_nor_trained(checkpoint, tmp_path):
    with MoE(checkpoint, host_memory="50%") as moe:
        with pytest.raises(UnsupportedModelError, match="cannot be saved"):
            moe.model.save_pretrained(tmp_path / "copy")
        loss = moe.model(PROMPT, labels=PROMPT).loss
        with pytest.raises(UnsupportedModelError, match="no gradient"):
            loss.backward()
