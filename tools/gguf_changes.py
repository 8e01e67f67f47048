"""What llama.cpp's converter does to single weights of hybrid models.

The loader's checkpoint/undo.py undoes it. Both are written from llama.cpp's conversion/, not from
each other.
"""

from __future__ import annotations

import re
from typing import Any

import torch

NAMES = {
    ".dt_bias": "ssm_dt.bias", ".expert_bias": "exp_probs_b.bias",
    ".experts.e_score_correction_bias": "exp_probs_b.bias",
    ".router.scale": "ffn_gate_inp.scale", ".router.per_expert_scale": "ffn_down_exps.scale",
    ".layer_scalar": "layer_output_scale.weight", "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    ".indexer.q_layernorm.weight": "indexer.q_norm.weight",
    ".indexer.k_layernorm.weight": "indexer.k_norm.weight",
    ".ple.key_proj.weight": "ple_key.weight", ".ple.value_proj.weight": "ple_value.weight",
    ".ple.norm_key.weight": "ple_norm_key.weight", ".ple.conv1d.weight": "ple_conv1d.weight",
    ".ple.norm_query.weight": "ple_norm_query.weight",
    ".ple.norm_conv.weight": "ple_norm_conv.weight",
} | {
    f"{module}.{name}.weight": f"{place}_{leaf}.weight"
    for module, place in (
        (".attn_hyper_connection", "hc_attn"), (".mlp_hyper_connection", "hc_ffn"),
        (".hyper_connection_mixer", "output_hc"),
    )
    for name, leaf in (
        ("hc_norm", "norm"), ("input_mix_weight_down", "down"), ("input_mix_weight_up", "up"),
        ("block_inject_weight", "inject"),
    )
}  # fmt: skip

# Architectures whose weights are changed, or have other names.
CHANGED = (
    "afmoe", "deepseek4", "gemma4", "glm5-next", "granitehybrid", "jamba", "kimi-linear", "laguna",
    "lfm2moe", "minimax-m3", "nemotron_h_moe", "qwen3next", "qwen35moe", "qwen3vlmoe", "qwen4exp",
    "step35",
)  # fmt: skip
OF_VISION = re.compile(r"\.visual\.|^vision_model\.|^vit_large_projector\.")
WITH_SHIFT = ("minimax-m3", "qwen35moe", "qwen3next", "qwen4exp", "step35")  # of their norms
# Where a checkpoint has names of its own, which another architecture has for something else.
NAMES_OF = {
    "minimax-m3": {
        f".indexer.{leaf}.weight": f"indexer.{leaf}.weight"
        for leaf in ("q_proj", "k_proj", "q_norm", "k_norm")
    } | {
        ".e_score_correction_bias": "exp_probs_b.bias",
        "mlp.experts.down_proj": "ffn_down_exps.weight",
        ".post_attention_layernorm.weight": "ffn_norm.weight",
    },
    "glm5-next": {
        ".dt_bias": "ssm_dt.bias", ".e_score_correction_bias": "exp_probs_b.bias",
        ".indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
        ".indexer.index_kpool_compress_gate": "indexer_compressor_gate.weight",
        ".indexer.k_norm.bias": "indexer.k_norm.bias",
        ".indexer.k_norm.weight": "indexer.k_norm.weight",
        ".indexer.weights_proj.weight": "indexer.proj.weight",
        ".indexer.wk.weight": "indexer.attn_k.weight",
        ".indexer.wq_b.weight": "indexer.attn_q_b.weight",
        ".post_attention_layernorm.weight": "ffn_norm.weight",
    } | {
        f".hc_{place}_{leaf}": f"hc_{place}_{leaf}.weight"
        for place in ("attn", "ffn") for leaf in ("fn", "base", "scale")
    },
    "qwen3vlmoe": {"mlp.experts.down_proj": "ffn_down_exps.weight"},
    "step35": {".moe.router_bias": "exp_probs_b.bias"},
    "deepseek4": {
        ".attn.attn_sink": "attn_sinks.weight", ".attn.norm.weight": "attn_kv_a_norm.weight",
        ".attn.q_norm.weight": "attn_q_a_norm.weight", ".attn.wkv.weight": "attn_kv.weight",
        ".wo_a.weight": "attn_output_a.weight", ".wo_b.weight": "attn_output_b.weight",
        ".wq_a.weight": "attn_q_a.weight", ".attn.wq_b.weight": "attn_q_b.weight",
        ".attn_norm.weight": "attn_norm.weight", ".ffn_norm.weight": "ffn_norm.weight",
        ".gate.tid2eid": "ffn_gate_tid2eid.weight", ".gate.weight": "ffn_gate_inp.weight",
        ".gate.bias": "exp_probs_b.bias", ".shared_experts.w1.weight": "ffn_gate_shexp.weight",
        ".shared_experts.w2.weight": "ffn_down_shexp.weight",
        ".shared_experts.w3.weight": "ffn_up_shexp.weight",
        ".indexer.weights_proj.weight": "indexer.proj.weight",
        ".indexer.wq_b.weight": "indexer.attn_q_b.weight",
    } | {
        f".{module}.{name}": f"{place}_{leaf}.weight"
        for module, place in (
            ("indexer.compressor", "indexer_compressor"), ("compressor", "attn_compressor"),
        )
        for name, leaf in (
            ("ape", "ape"), ("norm.weight", "norm"), ("wgate.weight", "gate"),
            ("wkv.weight", "kv"),
        )
    } | {
        f"{name}_{leaf}": f"{place}_{leaf}.weight"
        for name, place in (
            ("hc_attn", "hc_attn"), ("hc_ffn", "hc_ffn"), ("hc_head.hc", "output_hc"),
        )
        for leaf in ("base", "fn", "scale")
    } | {
        "head.weight": "output.weight", "embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    },
}  # fmt: skip


def changed(
    architecture: str, name: str, weight: torch.Tensor, config: dict[str, Any]
) -> torch.Tensor:
    """Return the tensor that the converter stores for a weight of the checkpoint."""
    if architecture in ("qwen35moe", "qwen4exp") and ".linear_attn." in name:
        weight = tiled(name, weight, config)
    if architecture in ("glm5-next", "kimi-linear") and "_conv1d." in name:
        return weight.unsqueeze(0)
    if architecture in ("granitehybrid", "nemotron_h_moe"):
        weight = mamba(name, weight, config)
    if name.endswith(".A_log"):
        return -weight.float().exp()
    has_shift = architecture in WITH_SHIFT and not name.endswith("linear_attn.norm.weight")
    if has_shift and ("norm.weight" in name or ".ple.norm_" in name):
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
