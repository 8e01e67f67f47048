"""What llama.cpp's converter writes for each layer of a model, and the tensors that are in no
checkpoint. Written from llama.cpp's conversion/.
"""

from __future__ import annotations

from math import pi
from typing import Any


def _of_full_layers(config: dict[str, Any]) -> dict[str, Any]:
    """What the config says of Gemma 4's layers without a window."""
    number = config["layer_types"].index("full_attention")
    by_number = {int(key): found for key, found in config["per_layer_config"].items()}  # "05"
    found: dict[str, Any] = by_number[number]
    return found


def as_written(config: dict[str, Any]) -> dict[str, Any]:
    """The config with a list where the converter writes one value for each layer."""
    kinds = config.get("layer_types", [])
    heads = config["num_key_value_heads"]
    if config["model_type"] in ("lfm2_moe", "granitemoehybrid"):
        counts = [heads if kind == "full_attention" else 0 for kind in kinds]
        epsilon = config.get("norm_eps", config.get("rms_norm_eps"))
        return config | {"num_key_value_heads": counts, "rms_norm_eps": epsilon}
    if config["model_type"] == "nemotron_h":
        kinds = config["layers_block_type"]
        width = config["moe_intermediate_size"]
        return config | {
            "num_hidden_layers": len(kinds),
            "rms_norm_eps": config["layer_norm_epsilon"],
            "num_key_value_heads": [heads * (kind == "full_attention") for kind in kinds],
            "intermediate_size": [width * (kind == "moe") for kind in kinds],
        }
    if config["model_type"] == "jamba":
        period = config["attn_layer_period"]
        numbers = range(config["num_hidden_layers"])
        is_full = [at % period == config["attn_layer_offset"] for at in numbers]
        return config | {"num_key_value_heads": [heads * full for full in is_full]}
    if "kv_lora_rank" in config:
        is_full = [kind != "linear_attention" for kind in kinds]
        is_hybrid = config["model_type"] in ("glm5_next", "kimi_linear")
        length = config.get("model_max_length") or config["max_position_embeddings"]
        return config | {
            "max_position_embeddings": length,
            "num_key_value_heads": [int(full) for full in is_full] if is_hybrid else 1,
            "head_dim": config["kv_lora_rank"] + config["qk_rope_head_dim"],
            "value_head_dim": config["kv_lora_rank"],
        }
    if config["model_type"] == "mimo_v2_flash":
        return config | {
            "rope_parameters": config["rope_parameters"]["full_attention"],
            "num_key_value_heads": [heads * (1 + (kind != "full_attention")) for kind in kinds],
            "value_head_dim": config["v_head_dim"],
        }
    if config["model_type"] == "deepseek_v4":
        rope = config["rope_parameters"]["compress"] | {"rope_theta": config["rope_theta"]}
        return config | {"rope_parameters": rope}
    if config["model_type"] in ("laguna", "mellum", "step3p7"):
        return config | {"rope_parameters": config["rope_parameters"]["full_attention"]}
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


def _llama3_factors(config: dict[str, Any]) -> dict[str, list[float]]:
    """What Llama 3 multiplies wavelengths with, and 1 for pairs that full layers do not rotate."""
    rope = config["rope_parameters"]["full_attention"]
    if rope["rope_type"] != "llama3":
        return {}
    factor, low, high = (rope[f"{n}factor"] for n in ("", "low_freq_", "high_freq_"))
    num_rotated = int(config["head_dim"] * rope["partial_rotary_factor"])
    factors = [1.0] * (config["head_dim"] // 2)
    for pair in range(num_rotated // 2):
        length = 2 * pi * rope["rope_theta"] ** (2 * pair / num_rotated)
        turns = rope["original_max_position_embeddings"] / length
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors[pair] = 1 / ((1 - smooth) / factor + smooth)
    return {"rope_freqs.weight": factors}


def more_tensors(config: dict[str, Any]) -> dict[str, list[float]]:
    """Tensors that are in no checkpoint."""
    if config["model_type"] == "step3p7":
        return _llama3_factors(config)
    if config["model_type"] != "gemma4_text":
        return {}
    num_pairs = _of_full_layers(config)["head_dim"] // 2
    share = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    num_rotated = int(num_pairs * share)
    return {"rope_freqs.weight": [1.0] * num_rotated + [1e30] * (num_pairs - num_rotated)}
