"""The config of a GGUF model from its own metadata, for architectures whose metadata name all that
transformers needs. For others the user names a folder that has the config.

Private names of transformers used here: `GGUF_CONFIG_MAPPING`.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from moe_infinity.errors import CheckpointError, MoEInfinityError, UnsupportedModelError
from moe_infinity.gguf.derived import one_of
from moe_infinity.gguf.fields import METADATA, Metadata
from moe_infinity.gguf.file import WITH_CONFIG, GgufModel
from moe_infinity.gguf.rope import rope_parameters
from moe_infinity.untrusted.config_limits import check_config

MAY_BE_ZERO = (
    "num_dense_layers", "num_kv_shared_layers", "hidden_size_per_layer_input", "num_hash_layers",
    "first_k_dense_replace", "moe_layer_start_index", "moe_num_shared_experts", "n_shared_experts",
    "num_shared_experts", "shared_intermediate_size",
)  # fmt: skip
ABSENT_IF_ZERO = (
    "attention.clamp_kqv", "attention.scale", "embedding_scale", "expert_group_count",
    "expert_group_used_count", "expert_weights_scale", "final_logit_softcapping", "logit_scale",
    "residual_scale",
)  # fmt: skip
NOT_SIZES = (  # may be larger
    "max_position_embeddings", "model_max_length", "sliding_window", "rope_theta",
)  # fmt: skip
REQUIRED = ("attention.head_count", "attention.layer_norm_rms_epsilon", "expert_used_count")
# Keys that change what a model computes, and values of theirs that do not. They are refused where
# the config has no field for them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,),
    "attention.scale": (0,), "attention.sliding_window": (0,), "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1), "expert_gating_func": (0, 1), "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1), "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1), "final_logit_softcapping": (0,),
    "interleave_moe_layer_step": (0, 1), "leading_dense_block_count": (0,), "logit_scale": (0, 1),
    "moe_every_n_layers": (0, 1), "residual_scale": (0, 1), "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,), "router_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
}  # fmt: skip


def config_of(gguf: GgufModel) -> Any:
    """transformers' config of a model. Raises UnsupportedModelError where the metadata are not
    enough, CheckpointError where they cannot be true.
    """
    where = gguf.files[0]
    known = METADATA.get(gguf.architecture)
    if known is None:
        raise UnsupportedModelError(
            f"{where}: the metadata of a {gguf.architecture} model do not say all of its config; "
            f"those of {', '.join(METADATA)} do\n{WITH_CONFIG}"
        )
    try:
        found = _fields(gguf, known)
    except MoEInfinityError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: the metadata are of no {gguf.architecture} model: {error}"
        ) from error
    check_config(where, found, trust_remote_code=False)
    model_type = found.pop("model_type", known.model_type)
    if known.whole is not None:
        found = {"text_config": found, "architectures": [known.whole]}
    try:
        return transformers.AutoConfig.for_model(model_type, **found)
    except Exception as error:  # each config class checks in its own way
        raise UnsupportedModelError(f"{where}: no config can be made of it: {error}") from error


def _fields(gguf: GgufModel, known: Metadata) -> dict[str, Any]:
    """All fields of the config. Metadata that are of no model may raise anything."""
    found = _mapped(gguf, known) | _from_tensors(gguf)
    _require_groups(gguf)
    ids = gguf.vocabulary.ids
    ends = gguf.vocabulary.ends()
    found |= {
        "bos_token_id": ids.get("bos"),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": ids.get("pad"),
    }
    found |= known.derived(gguf)
    heads = found["num_attention_heads"]
    found.setdefault("num_key_value_heads", heads)
    default = found["hidden_size"] // heads
    found.setdefault("head_dim", gguf.value("attention.key_length", default))
    if known.has_positions and "rope_parameters" not in found:
        found["rope_parameters"] = _positions(gguf, known, found)
    return found


def _require_groups(gguf: GgufModel) -> None:
    """Raise CheckpointError for experts in groups of which no token could choose some."""
    groups = gguf.value("expert_group_count") or 1
    experts = gguf.value("expert_count", 0)
    used = gguf.value("expert_group_used_count", 0)
    if groups > 1 and (experts % groups or experts < 2 * groups or not 0 < used <= groups):
        raise CheckpointError(
            f"{gguf.files[0]}: {gguf.architecture}.expert_group_count is {groups!r:.40} with "
            f"{experts!r:.40} experts, of which a token uses {used!r:.40} groups"
        )


def _positions(gguf: GgufModel, known: Metadata, found: dict[str, Any]) -> dict[str, Any]:
    """transformers' rope_parameters. Takes rope_theta out of what was found."""
    size = found["head_dim"]
    rotary = gguf.value("rope.dimension_count", size)
    if rotary != size and not known.has_partial_rotary:
        raise UnsupportedModelError(
            f"{gguf.files[0]}: rope.dimension_count is {rotary}, but heads have {size}"
            f"\n{WITH_CONFIG}"
        )
    positions = rope_parameters(gguf, found.pop("rope_theta", 10000.0), known.yarn)
    return positions | (
        {"partial_rotary_factor": rotary / size} if known.has_partial_rotary else {}
    )


def _mapped(gguf: GgufModel, known: Metadata) -> dict[str, Any]:
    """The fields of the config that the metadata name. A size is refused that no tensor of the
    model can have, and so is what no field can say.
    """
    largest = max(max(tensor.shape) for tensor in gguf.tensors.values())
    found = dict(known.fixed)
    fields = {**GGUF_CONFIG_MAPPING[known.like], "rope.dimension_count": None, **known.more}
    for key, name in fields.items():
        value = one_of(gguf.value(key))
        if name is None or value is None or (key in ABSENT_IF_ZERO and value == 0):
            continue
        is_size = type(value) is int and name not in NOT_SIZES
        least = 0 if name in MAY_BE_ZERO else 1
        if isinstance(value, list) and all(type(each) in (int, float) for each in value):
            raise UnsupportedModelError(
                f"{gguf.files[0]}: {gguf.architecture}.{key} is {value!r:.40}: all layers "
                f"of a {known.model_type} model have one value\n{WITH_CONFIG}"
            )
        if type(value) not in (int, float, bool) or (is_size and not least <= value <= largest):
            raise CheckpointError(f"{gguf.files[0]}: {gguf.architecture}.{key} is {value!r:.40}")
        found[name] = value
    for key in REQUIRED:
        if fields.get(key, key) is not None and gguf.value(key) is None:
            raise CheckpointError(f"{gguf.files[0]}: no {gguf.architecture}.{key}")
    for key, values in {**NEUTRAL, **known.neutral}.items():
        value = one_of(gguf.value(key, values[0]))
        if fields.get(key) is None and value not in values:
            raise UnsupportedModelError(
                f"{gguf.files[0]}: {gguf.architecture}.{key} is {value!r:.40}, which a "
                f"{known.model_type} model does not have\n{WITH_CONFIG}"
            )
    return found


def _from_tensors(gguf: GgufModel) -> dict[str, Any]:
    """The fields of the config that follow from the tensors, which cannot lie."""
    embeddings = gguf.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise CheckpointError(f"{gguf.files[0]}: no tensor token_embd.weight")
    vocab_size, hidden_size = embeddings.shape
    return {
        "num_hidden_layers": gguf.num_layers,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }
