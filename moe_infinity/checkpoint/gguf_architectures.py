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
from moe_infinity.checkpoint.gguf_rope import proportional_rope, rope_parameters
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
    has_positions: bool = True  # False: nothing is rotated
    has_partial_rotary: bool = False  # heads may have more columns than are rotated
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # where others are
    # Fields that more than one key, or the values of several layers, decide.
    derived: Callable[[GgufModel], dict[str, Any]] = lambda gguf: {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`. Parameters are named by the end of their names."""

    moved: Mapping[str, Undo] = field(default_factory=dict)  # whose rows or columns were moved
    changed: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    metadata: Metadata | None = None  # None: a user names a config
    unused: tuple[str, ...] = ()  # tensors of a layer that may be there without a parameter


def _of_layers(gguf: GgufModel, key: str) -> list[Any]:
    """The value of a key for each layer, of which a file may have one for all. Raises
    CheckpointError.
    """
    found = gguf.value(key)
    values = found if isinstance(found, list) else [found] * gguf.num_layers
    if len(values) < gguf.num_layers or not all(type(value) in (int, bool) for value in values):
        raise CheckpointError(
            f"{gguf.files[0]}: {gguf.architecture}.{key} is not one value for each layer"
        )
    return values[: gguf.num_layers]


def _recurrent_head(gguf: GgufModel) -> int:
    """Return the width of a head of linear attention or Mamba 2. Raises CheckpointError."""
    heads = gguf.value("ssm.time_step_rank")
    size = gguf.value("ssm.inner_size")
    if not all(type(number) is int and number > 0 for number in (heads, size)):
        raise CheckpointError(
            f"{gguf.files[0]}: no sizes of {gguf.architecture}'s recurrent layers"
        )
    return int(size // heads)


def _by_keys(gguf: GgufModel, others: str) -> dict[str, Any]:
    """Return which layers have attention: those that have keys."""
    heads = _of_layers(gguf, "attention.head_count_kv")
    return {
        "layer_types": ["full_attention" if count else others for count in heads],
        "num_key_value_heads": max(heads),
    }


def _delta_net(gguf: GgufModel) -> dict[str, Any]:
    """Return which layers have linear attention, and the size of its values' heads."""
    every = gguf.value("full_attention_interval", 4)
    if type(every) is not int or every < 1:
        raise CheckpointError(f"{gguf.files[0]}: no interval of layers with full attention")
    is_linear = [bool((number + 1) % every) for number in range(gguf.num_layers)]
    if gguf.value("attention.recurrent_layers") is not None:
        is_linear = _of_layers(gguf, "attention.recurrent_layers")
    kinds = ["linear_attention" if linear else "full_attention" for linear in is_linear]
    return {"layer_types": kinds, "linear_value_head_dim": _recurrent_head(gguf)}


def _qwen4(gguf: GgufModel) -> dict[str, Any]:
    """Return the fields of linear attention, of the index, and of the table of n-grams."""
    ratios = _of_layers(gguf, "attention.compress_ratios")
    found = _delta_net(gguf) | {"indexer_compress_ratio": max(ratios)}
    table = gguf.tensors.get("per_layer_token_embd.weight")
    if table is None:
        return found
    lists = [gguf.value(f"ple.{key}") for key in ("head_vocab_sizes", "layers")]
    for numbers in lists:  # of which transformers looks for primes, in a table of so many rows
        is_list = isinstance(numbers, list) and all(type(each) is int for each in numbers)
        if not is_list or not 0 < sum(numbers) <= table.shape[0] or min(numbers) < 0:
            raise CheckpointError(f"{gguf.files[0]}: no sizes of the table of n-grams")
    sizes, layers = lists
    first = gguf.value("ple.eos_token_id")
    return found | {
        "ple_layer_ids": [number + 1 for number in layers],
        "ple_embed_dim": table.shape[1] * len(sizes),
        "ngram_vocab_size_base": min(sizes),  # a prime number: the first that is large enough
        "make_ngram_vocab_size_divisible_by": table.shape[0],
        "eos_token_id": [first, *(end for end in gguf.vocabulary.ends() if end != first)],
    }


def _gemma4(gguf: GgufModel) -> dict[str, Any]:
    """Return the fields whose values are others in layers with a sliding window."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    layer_types = [kinds[bool(s)] for s in _of_layers(gguf, "attention.sliding_window_pattern")]
    heads = _of_layers(gguf, "attention.head_count_kv")
    widths = _of_layers(gguf, "feed_forward_length")
    full = [number for number, kind in enumerate(layer_types) if kind == "full_attention"]
    sliding = [number for number, kind in enumerate(layer_types) if kind != "full_attention"]
    size = gguf.value("attention.key_length")
    has_values = [f"blk.{number}.attn_{leaf}.weight" for number in full for leaf in ("v", "qkv")]
    table = gguf.tensors.get("per_layer_token_embd.weight")
    return {
        "layer_types": layer_types,
        "num_key_value_heads": heads[(sliding or full)[0]],
        "per_layer_config": {
            str(number): {"head_dim": size, "num_key_value_heads": heads[number]} for number in full
        },
        "attention_k_eq_v": not any(name in gguf.tensors for name in has_values),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] != widths[0],
        "vocab_size_per_layer_input": 1 if table is None else table.shape[0],
        "rope_parameters": {
            "full_attention": proportional_rope(gguf),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": gguf.value("rope.freq_base_swa", gguf.value("rope.freq_base", 1e4)),
            },
        },
    }


def _deepseek4(gguf: GgufModel) -> dict[str, Any]:
    """Return how layers compress, and both ways of their positions."""
    theta = gguf.value("rope.freq_base", 1e4)
    head = gguf.value("attention.key_length")
    rotated = gguf.value("rope.dimension_count", head)
    if not all(type(number) is int and number > 0 for number in (head, rotated)):
        raise CheckpointError(f"{gguf.files[0]}: no size of a head of {gguf.architecture}")
    return {
        "compress_ratios": _of_layers(gguf, "attention.compress_ratios"),
        "partial_rotary_factor": rotated / head,
        "rope_parameters": rope_parameters(gguf, theta, {"attention_factor": 1.0}),
        "rope_theta": theta,
    }


def _nemotron(gguf: GgufModel) -> dict[str, Any]:
    """Return what each layer is: attention if it has keys, experts if it has their width."""
    heads = _of_layers(gguf, "attention.head_count_kv")
    widths = _of_layers(gguf, "feed_forward_length")
    kinds = [
        "full_attention" if count else "moe" if width else "linear_attention"
        for count, width in zip(heads, widths, strict=True)
    ]
    epsilon = gguf.value("attention.layer_norm_epsilon", 1e-5)
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(heads),
        "mamba_head_dim": _recurrent_head(gguf),
        "layer_norm_epsilon": gguf.value("attention.layer_norm_rms_epsilon", epsilon),
    }


def _granite_hybrid(gguf: GgufModel) -> dict[str, Any]:
    """Return which layers have attention, and what Mamba and positions are."""
    return _by_keys(gguf, "linear_attention") | {
        "mamba_d_head": _recurrent_head(gguf),
        "mamba_expand": gguf.value("ssm.inner_size") // gguf.value("embedding_length"),
        "position_embedding_type": "rope" if gguf.value("rope.scaling.finetuned", True) else None,
    }


def _hybrid_qwen(model_type: str, fields: Mapping[str, str | None], **others: Any) -> Metadata:
    """Return what Qwen's models with linear attention have in common, and `fields` and `others`."""
    more = {**QWEN_FIELDS, **SHARED_EXPERT, **DELTA_NET_FIELDS, **fields}
    return Metadata(model_type, "qwen3_moe", more, has_partial_rotary=True, **others)


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
# Fields of the config by keys of the metadata.
QWEN_FIELDS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}
SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
DELTA_NET_FIELDS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
}  # fmt: skip
QWEN4_FIELDS = {
    "attention.indexer.head_count": "indexer_n_heads", "expert_weights_norm": None,
    "attention.indexer.key_length": "indexer_head_dim", "hyper_connection.count": "hc_count",
    "attention.indexer.top_k": "indexer_budget", "hyper_connection.low_rank": "hc_lowrank",
    "ple.conv_kernel": "ple_conv_kernel_size", "ple.heads_per_ngram": "heads_per_ngram",
    "ple.ngram_size": "ngram_size",
}  # fmt: skip
DEEPSEEK4_FIELDS = {
    "attention.compress_rope_freq_base": "compress_rope_theta", "feed_forward_length": None,
    "attention.indexer.head_count": "index_n_heads", "expert_count": "n_routed_experts",
    "attention.indexer.key_length": "index_head_dim", "expert_shared_count": "n_shared_experts",
    "attention.indexer.top_k": "index_topk", "expert_weights_norm": "norm_topk_prob",
    "attention.output_group_count": "o_groups", "expert_weights_scale": "routed_scaling_factor",
    "attention.output_lora_rank": "o_lora_rank", "hash_layer_count": "num_hash_layers",
    "attention.q_lora_rank": "q_lora_rank", "hyper_connection.count": "hc_mult",
    "attention.sliding_window": "sliding_window", "hyper_connection.epsilon": "hc_eps",
    "expert_feed_forward_length": "moe_intermediate_size", "swiglu_clamp_exp": "swiglu_limit",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
}  # fmt: skip
GRANITE_SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
GRANITE_FIELDS = {
    "attention.head_count_kv": None,
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "ssm.conv_kernel": "mamba_d_conv", "ssm.group_count": "mamba_n_groups",
    "ssm.state_size": "mamba_d_state", "ssm.time_step_rank": "mamba_n_heads",
}  # fmt: skip
GEMMA4_FIELDS = {
    "attention.head_count_kv": None, "attention.key_length": None, "feed_forward_length": None,
    "rope.freq_base": None, "attention.key_length_swa": "head_dim", "expert_count": "num_experts",
    "attention.shared_kv_layers": "num_kv_shared_layers", "expert_used_count": "top_k_experts",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_feed_forward_length": "moe_intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
LFM2_FIELDS = {
    "attention.head_count_kv": None, "attention.layer_norm_rms_epsilon": "norm_eps",
    "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "num_experts_per_tok", "leading_dense_block_count": "num_dense_layers",
}  # fmt: skip
NEMOTRON_FIELDS = {
    "attention.head_count_kv": None, "attention.layer_norm_rms_epsilon": None,
    "feed_forward_length": None, "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob", "expert_weights_scale": "routed_scaling_factor",
    "moe_latent_size": "moe_latent_size", "ssm.conv_kernel": "conv_kernel",
    "ssm.group_count": "n_groups", "ssm.state_size": "ssm_state_size",
    "ssm.time_step_rank": "mamba_num_heads",
}  # fmt: skip
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
ALWAYS_CHANGED = {".A_log": log_of_negative}
# What the converter only renames, beside experts and latent attention; a user names the config.
ONLY_NAMES = (
    "afmoe", "cohere2moe", "deepseek2", "deepseek32", "dots1", "ernie4_5-moe",
    "exaone-moe", "glm-dsa", "glm4moe", "glm5-next", "hunyuan-moe", "hy_v3", "jamba",
    "kimi-linear", "laguna", "llama4", "mellum", "mimo2", "minimax-m2", "phimoe",
    "qwen3vlmoe",
)  # fmt: skip
KNOWN = dict.fromkeys(ONLY_NAMES, Architecture()) | {
    "deepseek4": Architecture(
        metadata=Metadata(
            "deepseek_v4",
            "qwen3_moe",
            DEEPSEEK4_FIELDS,
            neutral={"expert_gating_func": (4,)},  # the square root of a softplus
            derived=_deepseek4,
        ),
        unused=("exp_probs_b_vl.bias",),  # of images
    ),
    "gemma4": Architecture(
        metadata=Metadata(
            "gemma4_text", "gemma3", GEMMA4_FIELDS, {"enable_moe_block": True}, derived=_gemma4
        ),
        # Layers that use the keys of others: their own are in the file, but nothing uses them.
        unused=("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"),
    ),
    "gpt-oss": Architecture(
        metadata=Metadata(
            "gpt_oss",
            "gpt_oss",
            {"attention.sliding_window": "sliding_window"},
            yarn={"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        )
    ),
    "granitehybrid": Architecture(
        moved=ROTARY_ORDER,
        metadata=Metadata(
            "granitemoehybrid",
            "qwen2",
            LOCAL_EXPERTS | GRANITE_SCALES | GRANITE_FIELDS,
            derived=_granite_hybrid,
        ),
    ),
    "granitemoe": Architecture(
        moved=ROTARY_ORDER, metadata=Metadata("granitemoe", "qwen2", LOCAL_EXPERTS | GRANITE_SCALES)
    ),
    "lfm2moe": Architecture(
        metadata=Metadata(
            "lfm2_moe",
            "lfm2",
            LFM2_FIELDS,
            neutral={"expert_gating_func": (2,)},  # sigmoid
            derived=lambda gguf: _by_keys(gguf, "conv"),
        )
    ),
    "llama": Architecture(moved=ROTARY_ORDER, metadata=Metadata("mixtral", "llama", LOCAL_EXPERTS)),
    "minimax-m3": Architecture(changed=NORMS_PLUS_ONE),
    "nemotron_h_moe": Architecture(
        moved=ROTARY_ORDER,
        metadata=Metadata(
            "nemotron_h",
            "qwen3_moe",
            NEMOTRON_FIELDS,
            has_positions=False,
            neutral={"expert_gating_func": (2, 0)},  # sigmoid, whether the file says so or not
            derived=_nemotron,
        ),
    ),
    "olmoe": Architecture(
        metadata=Metadata(
            "olmoe",
            "qwen2_moe",
            {"expert_weights_norm": "norm_topk_prob", "attention.clamp_kqv": "clip_qkv"},
        )
    ),
    "qwen2moe": Architecture(
        metadata=Metadata("qwen2_moe", "qwen2_moe", QWEN_FIELDS | SHARED_EXPERT)
    ),
    "qwen3moe": Architecture(
        metadata=Metadata("qwen3_moe", "qwen3_moe", QWEN_FIELDS, {"norm_topk_prob": True})
    ),
    "qwen3next": Architecture(
        changed=NORMS_PLUS_ONE,
        metadata=_hybrid_qwen("qwen3_next", {}, fixed={"norm_topk_prob": True}, derived=_delta_net),
    ),
    "qwen35moe": Architecture(
        moved=VALUE_HEADS,
        changed=NORMS_PLUS_ONE,
        metadata=_hybrid_qwen(
            "qwen3_5_moe_text", {"expert_weights_norm": None}, derived=_delta_net
        ),
    ),
    "qwen4exp": Architecture(
        moved=VALUE_HEADS,
        changed=NORMS_PLUS_ONE,
        # The config's defaults are others than what llama.cpp computes.
        metadata=_hybrid_qwen(
            "qwen4_exp_text",
            QWEN4_FIELDS,
            fixed={"indexer_kv_heads": 1, "output_gate_type": "sigmoid"},
            derived=_qwen4,
        ),
    ),
}
