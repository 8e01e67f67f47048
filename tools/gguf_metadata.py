"""The metadata that llama.cpp's converter writes of a config, beyond those of every model. Written
from llama.cpp's conversion/.
"""

from __future__ import annotations

from typing import Any

# Fields of a config whose values are those of keys.
FIELDS = {
    "first_k_dense_replace": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "n_shared_experts": "expert_shared_count",
    "num_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "moe_routed_scaling_factor": "expert_weights_scale",
    "router_scaling_factor": "expert_weights_scale",
    "route_scale": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "q_lora_rank": "attention.q_lora_rank",
    "kv_lora_rank": "attention.kv_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
}
# Architectures of which the converter writes them, and all of these.
WITH_FIELDS = (
    "afmoe", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1",
    "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm5_next", "glm_moe_dsa",
    "hy_v3", "kimi_linear", "laguna", "llama4_text", "mistral4", "solar_open",
)  # fmt: skip
# By model_type: how scores of experts are made of logits, where the converter says so.
SIGMOID = (
    "afmoe", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite",
    "glm5_next", "glm_moe_dsa", "hy_v3", "kimi_linear", "laguna", "mimo_v2_flash", "minimax_m2",
    "minimax_m3_vl_text", "solar_open",
)  # fmt: skip


WIDE_KEYS = ("ple.layer_multipliers", "ple.head_offsets", "ple.head_vocab_sizes")  # 64 bits


def more_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that the converter writes for some models only."""
    model_type = config["model_type"]
    found: dict[str, Any] = {}
    if model_type in WITH_FIELDS:
        found = {key: config[name] for name, key in FIELDS.items() if config.get(name) is not None}
    if "kv_lora_rank" in config:
        key_length = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        found["attention.key_length_mla"] = key_length
        rope = config.get("rope_parameters") or {}
        if (scale := rope.get("mscale_all_dim")) is not None:
            found["rope.scaling.yarn_log_multiplier"] = 0.1 * scale
    if "mlp_layer_types" in config and model_type in WITH_FIELDS:
        found["leading_dense_block_count"] = config["mlp_layer_types"].count("dense")
    if "expert_weights_scale" in found:
        found["expert_weights_scale"] = float(found["expert_weights_scale"])
    if model_type in SIGMOID:
        found["expert_gating_func"] = 2
    of_model = OF_MODELS.get(model_type)
    found |= {} if of_model is None else of_model(config)
    return found


def _gpt_oss(config: dict[str, Any]) -> dict[str, Any]:
    return {"expert_feed_forward_length": config["intermediate_size"]}


def _granite(config: dict[str, Any]) -> dict[str, Any]:
    return {"expert_shared_feed_forward_length": config["shared_intermediate_size"]}


def _granite_hybrid(config: dict[str, Any]) -> dict[str, Any]:
    return _granite(config) | {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
        "rope.scaling.finetuned": False,
    }


def _lfm2(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "shortconv.l_cache": config["conv_L_cache"],
        "expert_gating_func": 2,
        "leading_dense_block_count": config["num_dense_layers"],
    }


def _jamba(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_dt_rank"],
    }


def _glm5_next(config: dict[str, Any]) -> dict[str, Any]:
    limits = [config["swiglu_limit"]] * config["num_hidden_layers"]
    return {
        "attention.indexer.kpool": config["index_kpool"],
        "attention.indexer.kpool_select_tail": config["index_kpool_always_select_tail"],
        "attention.indexer.types": [kind == "full" for kind in config["indexer_types"]],
        "attention.layer_norm_epsilon": 1e-6,
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.epsilon": config["hc_eps"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "kda.gate_lower_bound": config["linear_lower_bound"],
        "kda.head_dim": config["linear_head_dim"],
        "rope.dimension_count": 0,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
    }


def _kimi_linear(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "kda.head_dim": config["linear_head_dim"],
    }


def _afmoe(config: dict[str, Any]) -> dict[str, Any]:
    return {"expert_weights_norm": True}  # a field that transformers does not save


def _ernie(config: dict[str, Any]) -> dict[str, Any]:
    shared = config["intermediate_size"] // config["num_key_value_heads"]  # so in the converter
    return {"expert_shared_feed_forward_length": shared}


def _windows(config: dict[str, Any]) -> dict[str, Any]:
    kinds = config["layer_types"]
    return {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds]}


def _cohere2(config: dict[str, Any]) -> dict[str, Any]:
    return _windows(config) | {
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": 2 if config["expert_selection_fn"] == "sigmoid" else 1,
        "feed_forward_length": config["prefix_dense_intermediate_size"]
        or config["intermediate_size"],
        "logit_scale": float(config["logit_scale"]),
        "rope.scaling.type": "none",
    }


def _hy_v3(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "expert_shared_feed_forward_length": config["moe_intermediate_size"],
        "expert_weights_norm": True,
    }


def _mellum(config: dict[str, Any]) -> dict[str, Any]:
    theta = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    return _windows(config) | {"rope.freq_base_swa": theta}


def _mimo(config: dict[str, Any]) -> dict[str, Any]:
    return _mellum(config) | {"attention.value_scale": config["attention_value_scale"]}


def _laguna(config: dict[str, Any]) -> dict[str, Any]:
    sliding = config["rope_parameters"]["sliding_attention"]
    full = config["rope_parameters"]["full_attention"]
    keys = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
    yarn = {f"rope.scaling.yarn_{k}": float(full[name]) for name, k in keys.items() if name in full}
    return yarn | {
        "attention.head_count": config["num_attention_heads_per_layer"],
        "rope.freq_base_swa": sliding["rope_theta"],
        "expert_weights_norm": True,
        "rope.dimension_count_swa": int(config["head_dim"] * sliding["partial_rotary_factor"]),
    }


def _step35(config: dict[str, Any]) -> dict[str, Any]:
    limits = {
        key: [float(limit or 0) for limit in config[name]]
        for key, name in (
            ("swiglu_clamp_exp", "swiglu_limits"), ("swiglu_clamp_shexp", "swiglu_limits_shared"),
        )
        if config[name] is not None
    }  # fmt: skip
    kinds = config["layer_types"]
    heads = {"sliding_attention": "num_sliding_attention_heads"}
    return _mellum(config) | limits | {
        "attention.head_count": [config[heads.get(k, "num_attention_heads")] for k in kinds],
        "attention.head_count_kv": [config["num_key_value_heads"]] * len(kinds),
        "expert_shared_feed_forward_length": config["share_expert_dim"],
        "expert_weights_norm": True,
        "expert_weights_scale": float(config["moe_router_scaling_factor"]),
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "moe_every_n_layers": 1,
        "rope.dimension_count": None,
    }  # fmt: skip


def _exaone(config: dict[str, Any]) -> dict[str, Any]:
    return _windows(config) | {
        "expert_shared_feed_forward_length": config["moe_intermediate_size"]
        * config["num_shared_experts"],
    }


def _glm_dsa(config: dict[str, Any]) -> dict[str, Any]:
    return {"attention.indexer.types": [kind == "full" for kind in config["indexer_types"]]}


def _hunyuan(config: dict[str, Any]) -> dict[str, Any]:
    """Of Hunyuan-A13B, where these are one for each layer."""
    return {
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_feed_forward_length": config["intermediate_size"],
        "expert_shared_count": 1,
    }


def _llama4(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "expert_feed_forward_length": config["intermediate_size"],
        "feed_forward_length": config["intermediate_size_mlp"],
    }


def _delta_net(config: dict[str, Any]) -> dict[str, Any]:
    num_values = config["linear_num_value_heads"]
    sections = config["rope_parameters"].get("mrope_section")
    kinds = config["layer_types"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": num_values,
        "ssm.inner_size": num_values * config["linear_value_head_dim"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds],
        "full_attention_interval": 4,
    } | ({"rope.dimension_sections": [*sections, 0]} if sections else {})


def _qwen4(config: dict[str, Any]) -> dict[str, Any]:
    is_full = [kind != "linear_attention" for kind in config["layer_types"]]
    table = config["ple_embed_dim"] // (config["ngram_size"] - 1) // config["heads_per_ngram"]
    return _delta_net(config) | {
        "hyper_connection.count": config["hc_count"],
        "hyper_connection.low_rank": config["hc_lowrank"],
        "attention.indexer.head_count": config["indexer_n_heads"],
        "attention.indexer.key_length": config["indexer_head_dim"],
        "attention.indexer.top_k": config["indexer_budget"],
        "attention.compress_ratios": [config["indexer_compress_ratio"] * full for full in is_full],
        "embedding_length_per_layer_input": table,
        "ple.layers": [number - 1 for number in config["ple_layer_ids"]],
        "ple.ngram_size": config["ngram_size"],
        "ple.heads_per_ngram": config["heads_per_ngram"],
        "ple.conv_kernel": config["ple_conv_kernel_size"],
        "ple.eos_token_id": config["eos_token_id"],
        "ple.layer_multipliers": config["layer_multipliers"],
        "ple.head_offsets": config["ngram_heads_offsets"],
        "ple.head_vocab_sizes": config["ngram_heads_vocab_sizes"],
    }


def _deepseek4(config: dict[str, Any]) -> dict[str, Any]:
    rates = config["compress_rates"]
    limits = [config["swiglu_limit"]] * config["num_hidden_layers"]
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.compress_ratios": [rates.get(kind, 0) for kind in config["layer_types"]],
        "attention.compress_rope_freq_base": float(config["compress_rope_theta"]),
        "attention.output_group_count": config["o_groups"],
        "attention.output_lora_rank": config["o_lora_rank"],
        "embedding_length_out": config["hidden_size"] * config["hc_mult"],
        "expert_gating_func": 4,
        "hash_layer_count": config["mlp_layer_types"].count("hash_moe"),
        "leading_dense_block_count": None,  # it has none
        "hyper_connection.count": config["hc_mult"],
        "hyper_connection.epsilon": config["hc_eps"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
    }


def _minimax_m3(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.indexer.block_size": config["index_block_size"],
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.local_blocks": config["index_local_blocks"],
        "attention.indexer.top_k": config["index_topk_blocks"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_shared_count": config["shared_intermediate_size"] // config["intermediate_size"],
        "expert_weights_norm": True,
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "feed_forward_length": config["dense_intermediate_size"],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
        "rope.dimension_count": config["rotary_dim"],
    }


def _nemotron(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_weights_norm": config["norm_topk_prob"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
    }


def _gemma4(config: dict[str, Any]) -> dict[str, Any]:
    kinds = config["layer_types"]
    return {
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds],
        "attention.key_length_swa": config["head_dim"],
        "attention.value_length_swa": config["head_dim"],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "rope.dimension_count_swa": config["head_dim"],
    }


def _qwen3_vl(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "n_deepstack_layers": len(config["vision_config"]["deepstack_visual_indexes"]),
        "rope.dimension_sections": [*config["rope_parameters"]["mrope_section"], 0],
    }


OF_MODELS = {
    "afmoe": _afmoe,
    "deepseek_v4": _deepseek4,
    "cohere2_moe": _cohere2,
    "ernie4_5_moe": _ernie,
    "exaone_moe": _exaone,
    "gemma4_text": _gemma4,
    "glm5_next": _glm5_next,
    "glm_moe_dsa": _glm_dsa,
    "gpt_oss": _gpt_oss,
    "granitemoehybrid": _granite_hybrid,
    "granitemoeshared": _granite,
    "hunyuan_v1_moe": _hunyuan,
    "hy_v3": _hy_v3,
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
    "laguna": _laguna,
    "lfm2_moe": _lfm2,
    "llama4_text": _llama4,
    "mellum": _mellum,
    "mimo_v2_flash": _mimo,
    "minimax_m2": _gpt_oss,
    "minimax_m3_vl_text": _minimax_m3,
    "nemotron_h": _nemotron,
    "qwen3_5_moe_text": _delta_net,
    "qwen3_next": _delta_net,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen4_exp_text": _qwen4,
    "step3p7": _step35,
}
