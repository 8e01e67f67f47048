"""Fields of a config that more than one key of a GGUF file, the values of several layers, or its
tensors decide.
"""

from __future__ import annotations

from typing import Any

from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.gguf.file import GgufModel
from moe_infinity.gguf.rope import (
    proportional_rope,
    require_one_base,
    rope_parameters,
    two_ropes,
)

THETA_SWA = 1e4  # of layers with a window, where llama.cpp has one that no key says
UNREACHED_WINDOW = 1 << 30  # tokens
BIASES = ("attn_q.bias", "attn_qkv.bias")


def of_layers(gguf: GgufModel, key: str, types: tuple[type, ...] = (int, bool)) -> list[Any]:
    """The value of a key for each layer, of which a file may have one for all. Raises
    CheckpointError.
    """
    found = gguf.value(key)
    values = found if isinstance(found, list) else [found] * gguf.num_layers
    if len(values) < gguf.num_layers or not all(type(value) in types for value in values):
        raise CheckpointError(
            f"{gguf.files[0]}: {gguf.architecture}.{key} is not one value for each layer"
        )
    return values[: gguf.num_layers]


def one_of(value: Any) -> Any:
    """Return the one value of an array for all layers, if they have the same."""
    is_same = isinstance(value, list) and len(value) > 0 and value.count(value[0]) == len(value)
    return value[0] if is_same else value


def recurrent_head(gguf: GgufModel) -> int:
    """Return the width of a head of linear attention or Mamba 2. Raises CheckpointError."""
    heads = gguf.value("ssm.time_step_rank")
    size = gguf.value("ssm.inner_size")
    if not all(type(number) is int and number > 0 for number in (heads, size)):
        raise CheckpointError(
            f"{gguf.files[0]}: no sizes of {gguf.architecture}'s recurrent layers"
        )
    return int(size // heads)


def by_keys(gguf: GgufModel, others: str) -> dict[str, Any]:
    """Return which layers have attention: those that have keys."""
    heads = of_layers(gguf, "attention.head_count_kv")
    return {
        "layer_types": ["full_attention" if count else others for count in heads],
        "num_key_value_heads": max(heads),
    }


def delta_net(gguf: GgufModel) -> dict[str, Any]:
    """Return which layers have linear attention, and the size of its values' heads."""
    every = gguf.value("full_attention_interval", 4)
    if type(every) is not int or every < 1:
        raise CheckpointError(f"{gguf.files[0]}: no interval of layers with full attention")
    is_linear = [bool((number + 1) % every) for number in range(gguf.num_layers)]
    if gguf.value("attention.recurrent_layers") is not None:
        is_linear = of_layers(gguf, "attention.recurrent_layers")
    kinds = ["linear_attention" if linear else "full_attention" for linear in is_linear]
    return {"layer_types": kinds, "linear_value_head_dim": recurrent_head(gguf)}


def qwen4(gguf: GgufModel) -> dict[str, Any]:
    """Return the fields of linear attention, of the index, and of the table of n-grams."""
    ratios = of_layers(gguf, "attention.compress_ratios")
    found = delta_net(gguf) | {"indexer_compress_ratio": max(ratios)}
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


def gemma4(gguf: GgufModel) -> dict[str, Any]:
    """Return the fields whose values are others in layers with a sliding window."""
    layer_types = windows(gguf)["layer_types"]
    heads = of_layers(gguf, "attention.head_count_kv")
    widths = of_layers(gguf, "feed_forward_length")
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
                "rope_theta": gguf.value("rope.freq_base_swa", THETA_SWA),
            },
        },
    }


def deepseek4(gguf: GgufModel) -> dict[str, Any]:
    """Return how layers compress, and both ways of their positions."""
    theta = gguf.value("rope.freq_base", 1e4)
    head = gguf.value("attention.key_length")
    rotated = gguf.value("rope.dimension_count", head)
    if not all(type(number) is int and number > 0 for number in (head, rotated)):
        raise CheckpointError(f"{gguf.files[0]}: no size of a head of {gguf.architecture}")
    return {
        "compress_ratios": of_layers(gguf, "attention.compress_ratios"),
        "partial_rotary_factor": rotated / head,
        "rope_parameters": rope_parameters(gguf, theta, {"attention_factor": 1.0}),
        "rope_theta": theta,
    }


def nemotron(gguf: GgufModel) -> dict[str, Any]:
    """Return what each layer is: attention if it has keys, experts if it has their width."""
    heads = of_layers(gguf, "attention.head_count_kv")
    widths = of_layers(gguf, "feed_forward_length")
    kinds = [
        "full_attention" if count else "moe" if width else "linear_attention"
        for count, width in zip(heads, widths, strict=True)
    ]
    epsilon = gguf.value("attention.layer_norm_epsilon", 1e-5)
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(heads),
        "mamba_head_dim": recurrent_head(gguf),
        "layer_norm_epsilon": gguf.value("attention.layer_norm_rms_epsilon", epsilon),
    }


def granite_scale(gguf: GgufModel) -> dict[str, Any]:
    """Return what scores of Granite's models are multiplied by where the file does not say it."""
    if gguf.value("attention.scale"):
        return {}
    width = gguf.value("embedding_length") // one_of(gguf.value("attention.head_count"))
    return {"attention_multiplier": gguf.value("attention.key_length", width) ** -0.5}


def granite_hybrid(gguf: GgufModel) -> dict[str, Any]:
    """Return which layers have attention, and what Mamba and positions are."""
    return (
        by_keys(gguf, "linear_attention")
        | granite_scale(gguf)
        | {
            "mamba_d_head": recurrent_head(gguf),
            "mamba_expand": gguf.value("ssm.inner_size") // gguf.value("embedding_length"),
            "position_embedding_type": "rope"
            if gguf.value("rope.scaling.finetuned", True)
            else None,
        }
    )


def has_tensor(gguf: GgufModel, *ends: str) -> bool:
    """Return True if the name of any tensor has one of these ends."""
    return any(name.endswith(ends) for name in gguf.tensors)


def by_tensors(gguf: GgufModel, end: str, kinds: tuple[str, str]) -> list[str]:
    """Return the first kind for layers that have a tensor of this name, the second for others."""
    return [kinds[f"blk.{number}.{end}" not in gguf.tensors] for number in range(gguf.num_layers)]


def attention_bias(gguf: GgufModel) -> dict[str, Any]:
    """Return whether queries, keys and values have a bias."""
    return {"attention_bias": has_tensor(gguf, *BIASES)}


def dense_first(gguf: GgufModel) -> dict[str, Any]:
    """Return which layers have experts: those that have a router."""
    return {"mlp_layer_types": by_tensors(gguf, "ffn_gate_inp.weight", ("sparse", "dense"))}


def windows(gguf: GgufModel) -> dict[str, Any]:
    """Return which layers have a sliding window."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    pattern = of_layers(gguf, "attention.sliding_window_pattern")
    return {"layer_types": [kinds[bool(each)] for each in pattern]}


def windows_by_period(gguf: GgufModel, period: int, *, full_is_first: bool) -> dict[str, Any]:
    """Return which layers have a sliding window. A file that does not list them may have another
    period: the first or the last layer of each has none.
    """
    every = gguf.value("attention.sliding_window_pattern", period)
    if isinstance(every, list):
        return windows(gguf)
    if type(every) is not int or every < 0:
        raise CheckpointError(f"{gguf.files[0]}: no pattern of layers with a window")
    full = 0 if full_is_first else every - 1
    is_full = [every > 0 and at % every == full for at in range(gguf.num_layers)]
    return {"layer_types": ["full_attention" if full else "sliding_attention" for full in is_full]}


def windows_if_any(gguf: GgufModel, period: int, *, full_is_first: bool) -> dict[str, Any]:
    """Return the same of models that may have no windows."""
    if gguf.value("attention.sliding_window", 0) > 0:
        return windows_by_period(gguf, period, full_is_first=full_is_first)
    return {"layer_types": ["full_attention"] * gguf.num_layers}


def afmoe(gguf: GgufModel) -> dict[str, Any]:
    """Return the windows of AFMoE, which rotates in layers with a window only: without one, they
    see all. Raises UnsupportedModelError for another period.
    """
    require_one_base(gguf)
    kinds = windows_by_period(gguf, 4, full_is_first=False)["layer_types"]
    usual = ["full_attention" if at % 4 == 3 else "sliding_attention" for at in range(len(kinds))]
    if kinds != usual:
        raise UnsupportedModelError(
            f"{gguf.files[0]}: afmoe.attention.sliding_window_pattern is another than of 4 layers"
        )
    return {"sliding_window": gguf.value("attention.sliding_window") or UNREACHED_WINDOW}


def gpt_oss(gguf: GgufModel) -> dict[str, Any]:
    """Return the kinds of layers of gpt-oss."""
    require_one_base(gguf)
    return windows_if_any(gguf, 2, full_is_first=False)


def llama4(gguf: GgufModel) -> dict[str, Any]:
    """Return what llama.cpp knows of the two models: the larger one does not norm its queries."""
    return attention_bias(gguf) | {"use_qk_norm": gguf.value("expert_count") != 128}


def glm4(gguf: GgufModel) -> dict[str, Any]:
    """Return what the tensors of GLM-4.5 say of its attention."""
    return attention_bias(gguf) | {"use_qk_norm": has_tensor(gguf, "attn_q_norm.weight")}


def ernie(gguf: GgufModel) -> dict[str, Any]:
    """Return whether ERNIE has biases, and that the last layer has experts."""
    return {
        "use_bias": has_tensor(gguf, *BIASES),
        "moe_layer_end_index": gguf.num_layers - 1,
    }


def mimo2(gguf: GgufModel) -> dict[str, Any]:
    """Return the fields of MiMo-V2, whose layers with a window have more heads of keys."""
    heads = of_layers(gguf, "attention.head_count_kv")
    kinds = windows(gguf)["layer_types"]
    full = kinds.index("full_attention") if "full_attention" in kinds else 0
    wanted = [heads[full] * (1 + (kind == "sliding_attention")) for kind in kinds]
    if heads != wanted and "full_attention" in kinds:
        raise UnsupportedModelError(
            f"{gguf.files[0]}: mimo2.attention.head_count_kv is {heads!r:.80}; the class in "
            "transformers has twice as many heads in layers with a window"
        )
    found = {"layer_types": kinds, "num_key_value_heads": heads[full]}
    return two_ropes(gguf, theta_swa=THETA_SWA) | dense_first(gguf) | found


def exaone(gguf: GgufModel) -> dict[str, Any]:
    """Return the kinds of layers of K-EXAONE."""
    return windows_by_period(gguf, 4, full_is_first=False) | dense_first(gguf)


def mellum(gguf: GgufModel) -> dict[str, Any]:
    """Return the kinds of layers of Mellum."""
    return windows_if_any(gguf, 4, full_is_first=False) | two_ropes(gguf)


def cohere2(gguf: GgufModel) -> dict[str, Any]:
    """Return the kinds of layers of Cohere's models, and what norms add to the mean."""
    is_softmax = one_of(gguf.value("expert_gating_func")) == 1
    return windows_by_period(gguf, 4, full_is_first=True) | dense_first(gguf) | {
        "expert_selection_fn": "softmax" if is_softmax else "sigmoid",
        "layer_norm_eps": gguf.value("attention.layer_norm_epsilon", 1e-5),
        "rms_norm_eps": gguf.value("attention.layer_norm_rms_epsilon"),  # None: LayerNorm
    }  # fmt: skip


def laguna(gguf: GgufModel) -> dict[str, Any]:
    """Return what layers of Laguna are, which have numbers of heads of their own."""
    heads = of_layers(gguf, "attention.head_count")
    if min(heads) < 1:
        raise CheckpointError(f"{gguf.files[0]}: laguna.attention.head_count is {heads!r:.40}")
    gate = gguf.tensors.get("blk.0.attn_gate.weight")
    is_by_head = gate is None or gate.shape[0] == heads[0]
    kinds = windows_if_any(gguf, 4, full_is_first=True)
    return two_ropes(gguf) | dense_first(gguf) | attention_bias(gguf) | kinds | {
        "gating": "per-head" if is_by_head else "per-element",
        "num_attention_heads": heads[0], "num_attention_heads_per_layer": heads,
    }  # fmt: skip


def granite(gguf: GgufModel) -> dict[str, Any]:
    """Return the class of Granite's models that have a shared expert."""
    width = gguf.value("expert_shared_feed_forward_length")
    if not width:
        return granite_scale(gguf)
    shared = {"model_type": "granitemoeshared", "shared_intermediate_size": width}
    return granite_scale(gguf) | shared


def minimax_m3(gguf: GgufModel) -> dict[str, Any]:
    """Return the kinds of layers of MiniMax-M3, and its shared expert's width."""
    kinds = ("minimax_m3_sparse", "full_attention")
    count = gguf.value("expert_shared_count", 1)
    return dense_first(gguf) | {
        "layer_types": by_tensors(gguf, "indexer.q_proj.weight", kinds),
        "rotary_dim": gguf.value("rope.dimension_count"),
        "shared_intermediate_size": count * gguf.value("expert_feed_forward_length", 0),
    }


def jamba(gguf: GgufModel) -> dict[str, Any]:
    """Return every how many layers of Jamba have attention and experts."""
    layers = range(gguf.num_layers)
    found: dict[str, Any] = {
        "num_key_value_heads": max(of_layers(gguf, "attention.head_count_kv")),
        "mamba_expand": gguf.value("ssm.inner_size") // gguf.value("embedding_length"),
    }
    for name, ends in (("attn", ("attn_q.", "attn_qkv.")), ("expert", ("ffn_gate_inp.",))):
        tensors = {f"blk.{number}.{end}weight": number for number in layers for end in ends}
        numbers = [number for tensor, number in tensors.items() if tensor in gguf.tensors] or [0]
        period = numbers[1] - numbers[0] if len(numbers) > 1 else gguf.num_layers
        found |= {f"{name}_layer_offset": numbers[0], f"{name}_layer_period": period}
    return found


def step35(gguf: GgufModel) -> dict[str, Any]:
    """Return the heads of Step 3.5's layers, and the limits of their gates: 0 is none."""
    heads = of_layers(gguf, "attention.head_count")

    def limits(*keys: str) -> list[Any] | None:
        key = next((key for key in keys if gguf.value(key) is not None), None)
        return None if key is None else of_layers(gguf, key, (int, float))

    ropes = two_ropes(gguf, full_share=0.5, theta_swa=THETA_SWA)
    return ropes | windows(gguf) | dense_first(gguf) | {
        "num_attention_heads": heads[0],
        "num_key_value_heads": of_layers(gguf, "attention.head_count_kv")[0],
        "per_layer_config": {str(n): {"num_attention_heads": h} for n, h in enumerate(heads)},
        "pad_token_id": gguf.vocabulary.ids.get("pad", 0),  # its config must have one
        # The second names are those of files from before llama.cpp knew the model.
        "swiglu_limits": limits("swiglu_clamp_exp", "swiglu_limits"),
        "swiglu_limits_shared": limits("swiglu_clamp_shexp", "swiglu_limits_shared"),
    }  # fmt: skip


def qwen3_vl(gguf: GgufModel) -> dict[str, Any]:
    """Return the sections of Qwen3-VL's positions."""
    sections = gguf.value("rope.dimension_sections")
    plain = rope_parameters(gguf, gguf.value("rope.freq_base", 1e4), {})
    return {"rope_parameters": plain | ({"mrope_section": sections[:3]} if sections else {})}
