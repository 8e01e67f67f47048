"""Rungs 3 and 4 of the numerics ladder: what a user may turn changes nothing in the result.

Also the layouts experts can lie in on disk: per expert, fused over experts, sharded, transposed,
and in another dtype than the model computes in.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_infinity import MoE, OffloadConfig
from moe_infinity.cache.policies import POLICIES
from moe_infinity.cli.inspection import inspect_checkpoint
from moe_infinity.errors import ConfigError, TraceError
from tests.on_demand import ON_DEMAND

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(3)]

PROMPT = torch.tensor([[3, 17, 5, 9, 40, 2, 77, 31]])


def greedy(model, **kwargs) -> torch.Tensor:
    mask = torch.ones_like(PROMPT)
    return model.generate(
        input_ids=PROMPT, attention_mask=mask, max_new_tokens=12, do_sample=False, **kwargs
    )


def stock_model(checkpoint: Path, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, **{"dtype": "auto", **kwargs}
    )


@torch.no_grad()
def assert_same_logits(checkpoint: Path, **options) -> None:
    dtype = options.get("dtype", "auto")
    expected = stock_model(checkpoint, dtype=dtype)(PROMPT).logits
    with MoE(checkpoint, host_memory="25%", exact=True, **options) as moe:
        found = moe.model(PROMPT).logits
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected), (found - expected).abs().max()


def tokens_of_all_in_memory(checkpoint: Path, *, exact: bool) -> torch.Tensor:
    """Exact: of stock transformers."""
    if exact:
        return greedy(stock_model(checkpoint))
    with MoE(checkpoint, host_memory="100%") as moe:
        return greedy(moe)


@pytest.mark.grid
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("host_memory", "exact"), [("5%", False), ("25%", True), ("25%", False), ("100%", True)]
)
def test_neither_budget_nor_policy_changes_a_token(tiny_checkpoint, host_memory, exact, policy):
    expected = tokens_of_all_in_memory(tiny_checkpoint, exact=exact)
    with MoE(tiny_checkpoint, host_memory=host_memory, policy=policy, exact=exact) as moe:
        assert torch.equal(greedy(moe), expected)
        assert torch.equal(greedy(moe), expected)  # with a warm cache
        moe.check_invariants()


@pytest.mark.parametrize(
    ("host_memory", "exact"), [("5%", False), ("40%", False), ("70%", False), ("40%", True)]
)
def test_prefetch_changes_no_token(tiny_checkpoint, host_memory, exact):
    expected = tokens_of_all_in_memory(tiny_checkpoint, exact=exact)
    with MoE(tiny_checkpoint, host_memory=host_memory, prefetch=True, exact=exact) as moe:
        for _ in range(4):  # the more it has learned, the more it loads ahead
            assert torch.equal(greedy(moe), expected)
            moe.check_invariants()
        if host_memory == "40%":
            assert moe.report().prefetches.begun > 0


def test_a_policy_that_predicts_nothing_cannot_prefetch(tiny_checkpoint):
    with pytest.raises(ConfigError, match="predicts nothing"):
        MoE(tiny_checkpoint, policy="lru", prefetch=True)


def test_what_was_learned_is_kept_for_the_next_run(tiny_checkpoint, tmp_path):
    history = tmp_path / "history.npz"
    for _ in range(2):
        with MoE(tiny_checkpoint, host_memory="25%", history=history) as moe:
            predictor = moe.engine.predictor
            assert predictor is not None
            first = predictor.num_tokens
            greedy(moe)
        assert history.exists()
    assert first > 0


def test_what_was_learned_under_one_budget_changes_no_token_under_another(
    tiny_checkpoint, tmp_path
):
    history = tmp_path / "history.npz"
    expected = tokens_of_all_in_memory(tiny_checkpoint, exact=False)
    for host_memory, prefetch in [("25%", False), ("70%", True), ("5%", True), ("100%", False)]:
        options: dict[str, Any] = {"host_memory": host_memory, "prefetch": prefetch}
        with MoE(tiny_checkpoint, history=history, **options) as moe:
            assert moe.engine.predictor is not None
            before = moe.engine.predictor.num_tokens
            assert torch.equal(greedy(moe), expected), options
            moe.check_invariants()
        assert (before > 0) == (host_memory != "25%"), "the history was read"


def test_the_history_of_another_model_is_refused(tiny_checkpoint, tmp_path):
    history = tmp_path / "history.npz"
    with MoE(tiny_checkpoint, history=history) as moe:
        greedy(moe)
    other = tmp_path / "other"
    copy_with_other_weights(tiny_checkpoint, other)
    with pytest.raises(TraceError, match="not a history of this model"):
        MoE(other, history=history)


def copy_with_other_weights(checkpoint: Path, folder: Path) -> None:
    model = stock_model(checkpoint)
    with torch.no_grad():
        model.model.norm.weight += 1
    model.save_pretrained(folder)


def test_a_padded_batch_gives_the_tokens_of_stock(tiny_checkpoint):
    ids = torch.tensor([[0, 0, 0, 5, 9, 40], [7, 3, 17, 5, 9, 40]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    inputs = {"input_ids": ids, "attention_mask": mask}
    expected = stock_model(tiny_checkpoint).generate(**inputs, max_new_tokens=12, do_sample=False)
    with MoE(tiny_checkpoint, host_memory="30%", exact=True) as moe:
        assert torch.equal(moe.generate(**inputs, max_new_tokens=12, do_sample=False), expected)


def test_sampling_and_beams_give_the_tokens_of_stock(tiny_checkpoint):
    stock = stock_model(tiny_checkpoint)
    with MoE(tiny_checkpoint, host_memory="25%", exact=True) as moe:
        for arguments in ({"num_beams": 3}, {"temperature": 0.8, "top_p": 0.9}):
            results = []
            for model in (stock, moe):
                torch.manual_seed(7)
                results.append(
                    model.generate(
                        input_ids=PROMPT,
                        attention_mask=torch.ones_like(PROMPT),
                        max_new_tokens=10,
                        do_sample="temperature" in arguments,
                        **arguments,
                    )
                )
            assert torch.equal(*results), arguments


def test_shards_are_read_like_a_single_file(sharded_checkpoint):
    assert len(list(sharded_checkpoint.glob("*.safetensors"))) > 1
    assert_same_logits(sharded_checkpoint)


def test_experts_fused_in_the_checkpoint_are_read_in_place(tiny_checkpoint, copy_of):
    folder = copy_of(tiny_checkpoint)
    fused = {  # the names and shapes the model itself has
        name: tensor.clone() for name, tensor in stock_model(tiny_checkpoint).state_dict().items()
    }
    assert any(t.ndim == 3 and name.endswith("gate_up_proj") for name, t in fused.items())
    save_file(fused, folder / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(folder)
    assert inspect_checkpoint(str(folder)).is_byte_copy


def test_another_dtype_than_stored_is_converted_as_stock_does(tiny_checkpoint):
    assert not inspect_checkpoint(str(tiny_checkpoint), dtype="float32").is_byte_copy
    assert_same_logits(tiny_checkpoint, dtype="float32")


def test_experts_stored_transposed_are_converted_one_by_one(tmp_path):
    """Qwen3-VL-MoE publishes its experts fused and transposed."""
    text = {
        "vocab_size": 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
        "pad_token_id": 0,
    }
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    published = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    shapes = {tuple(t.shape) for name, t in published.items() if name.endswith("gate_up_proj")}
    assert shapes == {(8, 32, 48)}, "expected [experts, hidden, 2 * expert width] in the file"
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert not inspect_checkpoint(str(tmp_path)).is_byte_copy
    stock = type(model).from_pretrained(tmp_path, dtype="auto")
    with torch.no_grad(), MoE(tmp_path, host_memory="25%", exact=True) as moe:
        assert torch.equal(moe.model(PROMPT).logits, stock(PROMPT).logits)


def test_start_up_reads_headers_and_dense_weights_only(tiny_checkpoint):
    summary = inspect_checkpoint(str(tiny_checkpoint))
    with MoE(tiny_checkpoint, config=OffloadConfig(host_memory="50%", **ON_DEMAND)) as moe:
        report = moe.report().as_dict()
    assert report["bytes_read"] == 0
    assert report["startup_bytes_read"] == summary.header_bytes + summary.dense_bytes
    assert json.dumps(report)
