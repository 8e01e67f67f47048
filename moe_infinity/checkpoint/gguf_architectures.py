"""The architectures of GGUF files that load, one entry each: what llama.cpp's converter does to the
weights, and how the config follows from the metadata. Both only beyond what is the rule:

    a weight     has the name of the gguf package's map, and is as in the checkpoint
    the config   has the fields that transformers' own table of metadata gives an entry

An entry is added when the tests compare the architecture with transformers: the converter may
change values as well, as it does with the norms of Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moe_infinity.checkpoint.gguf_file import GgufModel
from moe_infinity.checkpoint.gguf_undo import (
    GroupValueHeads,
    Undo,
    UndoRotaryOrder,
    log_of_negative,
    subtract_one,
)
from moe_infinity.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Metadata:
    """How a config is made of a file's metadata, where they are enough for it."""

    model_type: str  # of transformers
    like: str  # its entry in transformers' table of metadata
    # What the entry lacks: the field of a key, or None for a key that says nothing of the config.
    more: Mapping[str, str | None] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # what no metadata say
    yarn: Mapping[str, Any] = field(default_factory=dict)  # what metadata do not say of it
    has_partial_rotary: bool = False  # heads may have more columns than are rotated
    # Fields that more than one key, or the values of several layers, decide.
    derived: Callable[[GgufModel], dict[str, Any]] = lambda gguf: {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`. Parameters are named by the end of their names."""

    moved: Mapping[str, Undo] = field(default_factory=dict)  # whose rows or columns were moved
    changed: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    metadata: Metadata | None = None  # None: a user names a config


def _of_layers(gguf: GgufModel, key: str) -> list[Any]:
    """The values of a key that has one for each layer. Raises CheckpointError."""
    values = gguf.value(key)
    if not isinstance(values, list) or len(values) < gguf.num_layers:
        raise CheckpointError(
            f"{gguf.files[0]}: {gguf.architecture}.{key} is not one value for each layer"
        )
    return values[: gguf.num_layers]


def _delta_net(gguf: GgufModel) -> dict[str, Any]:
    """Return which layers have linear attention, and the size of its values' heads."""
    every = gguf.value("full_attention_interval", 4)
    heads = gguf.value("ssm.time_step_rank")
    size = gguf.value("ssm.inner_size")
    if not all(type(number) is int and number > 0 for number in (every, heads, size)):
        raise CheckpointError(f"{gguf.files[0]}: no sizes of {gguf.architecture}'s linear layers")
    is_linear = [bool((number + 1) % every) for number in range(gguf.num_layers)]
    if gguf.value("attention.recurrent_layers") is not None:
        is_linear = _of_layers(gguf, "attention.recurrent_layers")
    kinds = ["linear_attention" if linear else "full_attention" for linear in is_linear]
    return {"layer_types": kinds, "linear_value_head_dim": size // heads}


ROTARY_ORDER = {
    f".{name}_proj.{suffix}": UndoRotaryOrder(heads)
    for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"))
    for suffix in ("weight", "bias")
}  # pairs that the converter made neighbours
NORMS_PLUS_ONE = {
    f"{name}norm.weight": subtract_one
    for name in ("input_layer", "post_attention_layer", ".q_", ".k_", "model.")
}
QWEN_FIELDS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}
SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
DELTA_NET_FIELDS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
KNOWN = {
    "deepseek2": Architecture(),
    "ernie4_5-moe": Architecture(),
    "glm4moe": Architecture(),
    "gpt-oss": Architecture(
        metadata=Metadata(
            "gpt_oss",
            "gpt_oss",
            {"attention.sliding_window": "sliding_window"},
            yarn={"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        )
    ),
    "granitemoe": Architecture(
        moved=ROTARY_ORDER,
        metadata=Metadata(
            "granitemoe",
            "qwen2",
            LOCAL_EXPERTS
            | {
                "attention.scale": "attention_multiplier",
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            },
        ),
    ),
    "llama": Architecture(moved=ROTARY_ORDER, metadata=Metadata("mixtral", "llama", LOCAL_EXPERTS)),
    "llama4": Architecture(),
    "minimax-m2": Architecture(),
    "olmoe": Architecture(
        metadata=Metadata(
            "olmoe",
            "qwen2_moe",
            {"expert_weights_norm": "norm_topk_prob", "attention.clamp_kqv": "clip_qkv"},
        )
    ),
    "phimoe": Architecture(),
    "qwen2moe": Architecture(
        metadata=Metadata("qwen2_moe", "qwen2_moe", QWEN_FIELDS | SHARED_EXPERT)
    ),
    "qwen3moe": Architecture(
        metadata=Metadata("qwen3_moe", "qwen3_moe", QWEN_FIELDS, {"norm_topk_prob": True})
    ),
    "qwen3next": Architecture(
        changed=NORMS_PLUS_ONE | {".A_log": log_of_negative},
        metadata=Metadata(
            "qwen3_next",
            "qwen3_moe",
            QWEN_FIELDS | SHARED_EXPERT | DELTA_NET_FIELDS,
            {"norm_topk_prob": True},
            has_partial_rotary=True,
            derived=_delta_net,
        ),
    ),
    "qwen35moe": Architecture(
        moved={
            ".linear_attn.in_proj_qkv.weight": GroupValueHeads("linear_value_head_dim"),
            ".linear_attn.in_proj_z.weight": GroupValueHeads("linear_value_head_dim"),
            ".linear_attn.in_proj_a.weight": GroupValueHeads(),
            ".linear_attn.in_proj_b.weight": GroupValueHeads(),
            ".linear_attn.A_log": GroupValueHeads(),
            ".linear_attn.dt_bias": GroupValueHeads(),
            ".linear_attn.conv1d.weight": GroupValueHeads("linear_value_head_dim"),
            ".linear_attn.out_proj.weight": GroupValueHeads("linear_value_head_dim", dim=1),
        },
        changed=NORMS_PLUS_ONE | {".A_log": log_of_negative},
        metadata=Metadata(
            "qwen3_5_moe_text",
            "qwen3_moe",
            QWEN_FIELDS | SHARED_EXPERT | DELTA_NET_FIELDS | {"expert_weights_norm": None},
            has_partial_rotary=True,
            derived=_delta_net,
        ),
    ),
}
