"""The architectures of GGUF files that load, one entry each: what llama.cpp's converter does to
their weights beyond the rule. By the rule a weight has the name of the gguf package's map, and is
as in the checkpoint. fields.py has what their metadata say of the config.

An entry is added when the tests compare the architecture with transformers: the converter may
change values as well, as it does with the norms of Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from moe_infinity.checkpoint.undo import (
    GroupValueHeads,
    Undo,
    UndoRotaryOrder,
    log_of_negative,
    subtract_one,
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`. Parameters are named by the end of their names."""

    moved: Mapping[str, Undo] = field(default_factory=dict)  # whose rows or columns were moved
    changed: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()  # tensors of a layer that may be there without a parameter


VALUE_HEADS: dict[str, Undo] = {
    f".linear_attn.{name}": GroupValueHeads(width)
    for width, names in (
        (None, ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")),
        ("linear_value_head_dim", ("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight")),
    )
    for name in names
} | {".linear_attn.out_proj.weight": GroupValueHeads("linear_value_head_dim", dim=1)}
ROTARY_ORDER = {
    f".{name}_proj.{suffix}": UndoRotaryOrder(heads)
    for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for suffix in ("weight", "bias")
}  # pairs that the converter made neighbours
NORMS_PLUS_ONE = dict.fromkeys(
    ("layernorm.weight", ".q_norm.weight", ".k_norm.weight", "model.norm.weight",
     ".hc_norm.weight", ".norm_key.weight", ".norm_query.weight", ".norm_conv.weight"),
    subtract_one,
)  # fmt: skip
ALWAYS_CHANGED = {".A_log": log_of_negative}
# What the converter only renames, beside experts and latent attention.
ONLY_NAMES = (
    "afmoe", "cohere2moe", "deepseek2", "deepseek32", "dots1", "ernie4_5-moe", "exaone-moe",
    "glm4moe", "glm5-next", "gpt-oss", "hunyuan-moe", "hy_v3", "jamba", "kimi-linear",
    "laguna", "lfm2moe", "llama4", "mellum", "mimo2", "minimax-m2", "mistral4", "olmoe", "phimoe",
    "qwen2moe", "qwen3moe", "qwen3vlmoe",
)  # fmt: skip
KNOWN = dict.fromkeys(ONLY_NAMES, Architecture()) | {
    "deepseek4": Architecture(unused=("exp_probs_b_vl.bias",)),  # of images
    # Layers that use the keys of others: their own are in the file, but nothing uses them.
    "gemma4": Architecture(unused=("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")),
    # Layers that attend to the tokens that another layer chose.
    "glm-dsa": Architecture(
        unused=(
            "indexer.attn_k.weight",
            "indexer.attn_q_b.weight",
            "indexer.k_norm.weight",
            "indexer.k_norm.bias",
            "indexer.proj.weight",
        )
    ),
    "granitehybrid": Architecture(moved=ROTARY_ORDER),
    "granitemoe": Architecture(moved=ROTARY_ORDER),
    "llama": Architecture(moved=ROTARY_ORDER),
    "minimax-m3": Architecture(changed=NORMS_PLUS_ONE),
    "nemotron_h_moe": Architecture(moved=ROTARY_ORDER),
    "qwen35moe": Architecture(moved=VALUE_HEADS, changed=NORMS_PLUS_ONE),
    "qwen3next": Architecture(changed=NORMS_PLUS_ONE),
    "qwen4exp": Architecture(moved=VALUE_HEADS, changed=NORMS_PLUS_ONE),
    "step35": Architecture(changed=NORMS_PLUS_ONE),
}
