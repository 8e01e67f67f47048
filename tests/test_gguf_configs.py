"""Configs made of the metadata of GGUF files, for models that are set otherwise than those of
gguf_files.py: each key that a config follows from has another value here.
"""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFValueType as T
from safetensors.torch import load_file

from moe_infinity import MoE
from moe_infinity.errors import CheckpointError, UnsupportedModelError
from tests.closeness import distance
from tests.gguf_files import build, rewrite, stock_model
from tests.test_gguf_families import LLAMA_PYTHON, ids_of, logits_of_llama_cpp
from tools.convert_to_gguf import ARCHITECTURES, convert

pytestmark = pytest.mark.arithmetic

TOLERANCE = 1e-5
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
    "original_max_position_embeddings": 16,
}  # fmt: skip
# Tests by name of the model and number of the settings.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "afmoe": [{"num_dense_layers": 2, "num_hidden_layers": 8, "layer_types": None}],
    "cohere2_moe": [
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "num_shared_experts": 2,
         "prefix_dense_intermediate_size": 160, "logit_scale": 0.5, "tie_word_embeddings": False,
         "mlp_layer_types": ["dense"] + ["sparse"] * 3,
         "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        {"rms_norm_eps": 1e-3},
    ],
    "deepseek_v2": [
        {"q_lora_rank": None, "first_k_dense_replace": 1, "num_hidden_layers": 27,
         "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ],
    "deepseek_v3": [
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ],
    "dots1": [{"norm_topk_prob": True, "n_shared_experts": 2}],
    "ernie4_5_moe": [
        {"use_bias": True, "moe_layer_interval": 2, "num_hidden_layers": 4,
         "tie_word_embeddings": True},
    ],
    "exaone_moe": [{"num_shared_experts": 2, "norm_topk_prob": False}],
    "glm4_moe": [
        {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5,
         "n_shared_experts": 2},
    ],
    "glm5_next": [
        {"linear_lower_bound": None, "index_kpool_always_select_tail": False, "index_kpool": 8,
         "norm_topk_prob": False, "n_shared_experts": 2},
    ],
    "glm_moe_dsa": [{"indexer_types": ["full", "shared", "full"]}],
    "granitemoeshared": [
        {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
         "logits_scaling": 3.0},
    ],
    "hunyuan_v1_moe": [{"head_dim": 32}],
    "hy_v3": [{"router_scaling_factor": 1.5}],
    "jamba": [{"attn_layer_period": 4, "attn_layer_offset": 2, "num_hidden_layers": 6}],
    "kimi_linear": [
        {"layer_types": [*["linear_attention"] * 3, "full_attention"],
         "routed_scaling_factor": 1.5, "num_shared_experts": 2},
    ],
    "laguna": [
        {"gating": "per-element", "num_attention_heads_per_layer": [2, 4, 4, 4],
         "moe_routed_scaling_factor": 2.5,
         "rope_parameters": {
             "full_attention": YARN | {"partial_rotary_factor": 0.5},
             "sliding_attention": ROPE | {"partial_rotary_factor": 1.0},
         }},
        {"layer_types": ["full_attention"] * 4, "sliding_window": 0,
         "rope_parameters": {
             "full_attention": YARN | {"partial_rotary_factor": 0.5, "attention_factor": 1.3},
             "sliding_attention": ROPE | {"partial_rotary_factor": 1.0},
         }},
    ],
    "llama4_text": [{"interleave_moe_layer_step": 1}, {"intermediate_size_mlp": 112}],
    "minimax_m2": [{"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}],
    "minimax_m3_vl_text": [{"shared_intermediate_size": 192, "routed_scaling_factor": 1.5}],
    "qwen3_vl_moe": [{"rope_parameters": ROPE | {"mrope_section": [4, 2, 2]}}],
    "step3p7": [
        {"swiglu_limits": None, "swiglu_limits_shared": [0.02, None, None, None],
         "num_sliding_attention_heads": 2, "moe_router_scaling_factor": 1.0,
         "mlp_layer_types": ["sparse"] * 4,
         "rope_parameters": {
             "full_attention": ROPE | {"partial_rotary_factor": 0.5},
             "sliding_attention": ROPE | {"rope_theta": 500.0},
         }},
    ],
}  # fmt: skip
# llama.cpp wants q_lora_rank but for models of 26 or 27 layers, and all experts behind the first.
# It does not read yarn_attn_factor.
OTHERWISE_IN_LLAMA_CPP = [("deepseek_v3", 1), ("ernie4_5_moe", 0), ("laguna", 1)]
CASES = [(name, number) for name, given in SETTINGS.items() for number in range(len(given))]


@pytest.fixture
def made(request, tmp_path) -> tuple[Path, Path]:
    """A checkpoint with other settings, and its GGUF file."""
    name, number = request.param
    folder = build(name, tmp_path / "model", **SETTINGS[name][number])
    convert(folder, tmp_path / "model.gguf", "f32")
    return folder, tmp_path / "model.gguf"


def logits_of(file: Path, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), MoE(file, dtype="float32", host_memory="50%", device="cpu") as moe:
        found: torch.Tensor = moe.model(ids).logits
    return found


@pytest.mark.parametrize("made", CASES, indirect=True)
def test_a_file_says_all_of_its_config(made):
    folder, file = made
    with torch.no_grad():
        expected = stock_model(folder)(ids_of(40)).logits
    assert distance(logits_of(file, ids_of(40)), expected) < TOLERANCE


@pytest.mark.skipif(LLAMA_PYTHON is None, reason="MOE_INFINITY_LLAMA_PYTHON names no interpreter")
@pytest.mark.parametrize(
    "made", [case for case in CASES if case not in OTHERWISE_IN_LLAMA_CPP], indirect=True
)
def test_llama_cpp_sees_the_same_config(made, tmp_path):
    _, file = made
    ours = logits_of(file, ids_of(40)).numpy()
    theirs = logits_of_llama_cpp(file, ids_of(40), tmp_path)
    of_tokens = [np.corrcoef(*pair)[0, 1] for pair in zip(ours[0], theirs[0], strict=True)]
    assert np.median(of_tokens) > 0.9999


@pytest.mark.parametrize("made", [("glm5_next", 0)], indirect=True)
def test_a_file_of_glm5_next_without_a_limit_has_none(made, tmp_path):
    folder, file = made
    keys: dict[str, Any] = dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp"))
    unlimited = rewrite(
        file, tmp_path / "unlimited.gguf", {f"glm5-next.{key}": v for key, v in keys.items()}
    )
    stock = stock_model(folder)
    for module in stock.modules():
        if hasattr(module, "swiglu_limit"):
            module.swiglu_limit = inf
    with torch.no_grad():
        expected = stock(ids_of(40)).logits
    assert distance(logits_of(unlimited, ids_of(40)), expected) < TOLERANCE
    assert distance(logits_of(file, ids_of(40)), expected) > TOLERANCE


@pytest.mark.parametrize("made", [("cohere2_moe", 1)], indirect=True)
def test_scores_may_be_said_for_each_layer(made, tmp_path):
    folder, file = made
    key = "cohere2moe.expert_gating_func"
    listed = rewrite(file, tmp_path / "listed.gguf", {key: [1, 1, 1, 1]})
    with torch.no_grad():
        expected = stock_model(folder)(ids_of(40)).logits
    assert distance(logits_of(listed, ids_of(40)), expected) < TOLERANCE


@pytest.mark.parametrize("made", [("step3p7", 0)], indirect=True)
def test_a_limit_may_be_said_once_for_all_layers(made, tmp_path):
    folder, file = made
    key = "step35.swiglu_clamp_shexp"
    once = rewrite(file, tmp_path / "once.gguf", {key: (T.FLOAT32, 0.02)})
    stock = stock_model(folder)
    for module in stock.modules():
        if type(module).__name__ == "Step3p7MLP":
            module.limit = 0.02
    with torch.no_grad():
        expected = stock(ids_of(40)).logits
    assert distance(logits_of(once, ids_of(40)), expected) < TOLERANCE
    assert distance(logits_of(file, ids_of(40)), expected) > TOLERANCE


@pytest.mark.parametrize("made", [("deepseek_v2", 0)], indirect=True)
def test_files_of_before_latent_attention_was_split(made, tmp_path):
    """As those of DeepSeek-V2 until April 2025, of which llama.cpp says no more than this."""
    folder, file = made
    stored = load_file(folder / "model.safetensors")
    tensors: dict[str, Any] = {}
    for number in range(27):
        joined = stored[f"model.layers.{number}.self_attn.kv_b_proj.weight"].float().numpy()
        tensors[f"blk.{number}.attn_kv_b.weight"] = joined
        tensors |= dict.fromkeys((f"blk.{number}.attn_{part}_b.weight" for part in "kv"), None)
    keys: dict[str, Any] = {
        "attention.head_count_kv": (T.UINT32, 4), "attention.key_length": (T.UINT32, 48),
        "attention.value_length": (T.UINT32, 32), "attention.key_length_mla": None,
        "attention.value_length_mla": None, "expert_weights_norm": None,
    }  # fmt: skip
    older = rewrite(
        file, tmp_path / "older.gguf", {f"deepseek2.{k}": v for k, v in keys.items()}, **tensors
    )
    with torch.no_grad():
        expected = stock_model(folder)(ids_of(40)).logits
    assert distance(logits_of(older, ids_of(40)), expected) < TOLERANCE


@pytest.mark.parametrize(
    ("made", "key", "value"),
    [
        (("deepseek_v3", 0), "attention.key_length_mla", (T.UINT32, 8)),
        (("deepseek_v3", 0), "rope.dimension_count", "64"),
        (("deepseek_v3", 0), "expert_group_count", "2"),
        (("deepseek_v3", 0), "rope.scaling.yarn_log_multiplier", "0.1"),
        (("cohere2_moe", 0), "attention.sliding_window_pattern", "every"),
        (("glm5_next", 0), "attention.head_count", "4"),
        (("glm_moe_dsa", 0), "attention.indexer.types", [1]),
        (("laguna", 0), "attention.head_count", [4]),
        (("laguna", 0), "attention.head_count", [0, 4, 4, 4]),
        (("laguna", 0), "attention.head_count", (T.UINT32, 0)),
        (("laguna", 0), "attention.sliding_window", "16"),
        (("jamba", 0), "attention.head_count_kv", "2"),
        (("jamba", 0), "ssm.inner_size", "wide"),
        (("minimax_m3_vl_text", 0), "expert_shared_count", "two"),
        (("qwen3_vl_moe", 0), "rope.dimension_sections", (T.UINT32, 4)),
        (("step3p7", 0), "attention.head_count", (T.UINT32, 0)),
        (("step3p7", 0), "attention.sliding_window_pattern", "every"),
        (("step3p7", 0), "swiglu_clamp_shexp", "much"),
        (("step3p7", 0), "swiglu_clamp_shexp", [1.0]),
    ],
    indirect=["made"],
)
def test_values_of_no_model_are_refused(made, key, value, tmp_path, request):
    name, _ = request.node.callspec.params["made"]
    full = f"{ARCHITECTURES[name]}.{key}"
    with pytest.raises((CheckpointError, UnsupportedModelError)):
        MoE(rewrite(made[1], tmp_path / "other.gguf", {full: value}))


def test_files_of_grouped_experts_that_do_not_say_so_are_warned_of(tmp_path, caplog):
    for count, warns in ((8, False), (160, True)):
        folder = build("deepseek_v2", tmp_path / str(count), n_routed_experts=count)
        convert(folder, folder / "model.gguf", "f32")
        caplog.clear()
        with MoE(folder / "model.gguf", device="cpu"):
            assert ("expert_group_count" in caplog.text) == warns


@pytest.mark.parametrize("made", [("deepseek_v3", 0)], indirect=True)
def test_a_way_to_attend_that_no_config_says_is_refused(made, tmp_path):
    """Of Mistral Large 3, which has DeepSeek's name."""
    keys = {"deepseek2.attention.temperature_scale": (T.FLOAT32, 0.1)}
    with pytest.raises(UnsupportedModelError, match=r"temperature_scale(.|\n)*--config"):
        MoE(rewrite(made[1], tmp_path / "other.gguf", keys))
