"""What llama.cpp's converter does to single weights of hybrid models, and their metadata.

The loader's gguf_undo.py undoes it. Both are written from llama.cpp's conversion/, not from each
other.
"""

from __future__ import annotations

from typing import Any

import torch

NAMES = {
    ".dt_bias": "ssm_dt.bias", ".expert_bias": "exp_probs_b.bias",
    ".router.scale": "ffn_gate_inp.scale", ".router.per_expert_scale": "ffn_down_exps.scale",
    ".layer_scalar": "layer_output_scale.weight", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}  # fmt: skip


def changed(
    architecture: str, name: str, weight: torch.Tensor, config: dict[str, Any]
) -> torch.Tensor:
    """Return the tensor that the converter stores for a weight of the checkpoint."""
    if architecture == "qwen35moe" and ".linear_attn." in name:
        weight = tiled(name, weight, config)
    if architecture in ("granitehybrid", "nemotron_h_moe"):
        weight = mamba(name, weight, config)
    if name.endswith(".A_log"):
        return -weight.float().exp()
    has_shift = architecture.startswith("qwen3") and not name.endswith("linear_attn.norm.weight")
    if has_shift and name.endswith("norm.weight"):
        return weight + 1
    return weight.squeeze(1) if "conv" in name and weight.ndim == 3 else weight


def tiled(name: str, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Value heads v0 v1 | v2 v3 of two key heads become v0 v2 | v1 v3."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]
    head = torch.arange(values).reshape(keys, -1).T.flatten()
    one_row = head
    rows = (head[:, None] * size + torch.arange(size)).flatten()
    num_others = 2 * keys * config["linear_key_head_dim"]
    after_keys = torch.cat([torch.arange(num_others), num_others + rows])
    leaf = name.split(".linear_attn.")[1].removesuffix(".weight")
    order = {
        "in_proj_qkv": after_keys, "conv1d": after_keys, "in_proj_z": rows, "in_proj_a": one_row,
        "in_proj_b": one_row, "A_log": one_row, "dt_bias": one_row,
    }  # fmt: skip
    if leaf == "out_proj":
        return weight[:, rows]
    return weight[order[leaf]] if leaf in order else weight


def mamba(name: str, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """The shapes that llama.cpp wants of Mamba 2's vectors, and rotary pairs as neighbours."""
    if name.endswith((".A_log", ".D")):
        return weight[:, None]
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return weight.reshape(config.get("n_groups") or config["mamba_n_groups"], -1)
    for leaf, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if name.endswith(f".{leaf}.weight"):
            halves = weight.reshape(config[heads], 2, -1, weight.shape[1])
            return halves.swapaxes(1, 2).reshape(weight.shape)
    return weight


def more_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that the converter writes for these models only."""
    if config["model_type"] == "gemma4_text":
        return _gemma4(config)
    if config["model_type"] == "nemotron_h":
        return _nemotron(config)
    if config["model_type"] == "gpt_oss":
        return {"expert_feed_forward_length": config["intermediate_size"]}
    if config["model_type"] == "granitemoehybrid":
        return {
            "ssm.conv_kernel": config["mamba_d_conv"], "ssm.state_size": config["mamba_d_state"],
            "ssm.group_count": config["mamba_n_groups"],
            "ssm.time_step_rank": config["mamba_n_heads"],
            "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
            "rope.scaling.finetuned": False,
        }  # fmt: skip
    if config["model_type"] == "lfm2_moe":
        return {
            "shortconv.l_cache": config["conv_L_cache"], "expert_gating_func": 2,
            "leading_dense_block_count": config["num_dense_layers"],
        }  # fmt: skip
    if "linear_num_key_heads" not in config:
        return {}
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


def _of_full_layers(config: dict[str, Any]) -> dict[str, Any]:
    """What the config says of Gemma 4's layers without a window."""
    number = config["layer_types"].index("full_attention")
    found: dict[str, Any] = config["per_layer_config"][str(number)]
    return found


def as_written(config: dict[str, Any]) -> dict[str, Any]:
    """The config with a list where the converter writes one value for each layer."""
    kinds = config.get("layer_types", [])
    heads = config["num_key_value_heads"]
    if config["model_type"] == "lfm2_moe":
        counts = [heads if kind == "full_attention" else 0 for kind in kinds]
        return config | {"num_key_value_heads": counts, "rms_norm_eps": config["norm_eps"]}
    if config["model_type"] == "granitemoehybrid":
        counts = [heads if kind == "full_attention" else 0 for kind in kinds]
        return config | {"num_key_value_heads": counts}
    if config["model_type"] == "nemotron_h":
        kinds = config["layers_block_type"]
        width = config["moe_intermediate_size"]
        return config | {
            "num_hidden_layers": len(kinds),
            "rms_norm_eps": config["layer_norm_epsilon"],
            "num_key_value_heads": [heads * (kind == "full_attention") for kind in kinds],
            "intermediate_size": [width * (kind == "moe") for kind in kinds],
        }
    if config["model_type"] != "gemma4_text":
        return config
    full = _of_full_layers(config)
    in_full = full.get("num_key_value_heads", heads)
    first_shared = config["num_hidden_layers"] - config["num_kv_shared_layers"]
    width = config["intermediate_size"]
    wide = 2 * width if config["use_double_wide_mlp"] else width
    return config | {
        "num_key_value_heads": [in_full if kind == "full_attention" else heads for kind in kinds],
        "intermediate_size": [width if at < first_shared else wide for at in range(len(kinds))],
        "head_dim": full["head_dim"],
        "num_experts_per_tok": config["top_k_experts"],
        "rope_parameters": {
            "rope_theta": config["rope_parameters"]["full_attention"]["rope_theta"]
        },
    }


def more_tensors(config: dict[str, Any]) -> dict[str, list[float]]:
    """Tensors that are in no checkpoint."""
    if config["model_type"] != "gemma4_text":
        return {}
    num_pairs = _of_full_layers(config)["head_dim"] // 2
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    num_rotated = int(num_pairs * share)
    return {"rope_freqs.weight": [1.0] * num_rotated + [1e30] * (num_pairs - num_rotated)}
