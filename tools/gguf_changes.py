"""What llama.cpp's converter does to single weights of hybrid models, and their metadata.

The loader's gguf_undo.py undoes it. Both are written from llama.cpp's conversion/, not from each
other.
"""

from __future__ import annotations

from typing import Any

import torch


def changed(
    architecture: str, name: str, weight: torch.Tensor, config: dict[str, Any]
) -> torch.Tensor:
    """Return the tensor that the converter stores for a weight of the checkpoint."""
    if architecture == "qwen35moe" and ".linear_attn." in name:
        weight = tiled(name, weight, config)
    if name.endswith(".A_log"):
        return -weight.float().exp()
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return weight + 1
    return weight.squeeze() if "conv1d" in name else weight


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


def more_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """The keys that the converter writes for hybrid models only."""
    if "linear_num_key_heads" not in config:
        return {}
    num_values = config["linear_num_value_heads"]
    kinds = config["layer_types"]
    return {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": num_values,
        "ssm.inner_size": num_values * config["linear_value_head_dim"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds],
        "full_attention_interval": 4,
        "rope.dimension_sections": [11, 11, 10, 0],
    }
