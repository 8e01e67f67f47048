"""The config of a GGUF model from its own metadata, for architectures whose metadata name all that
transformers needs. For others the user names a folder that has the config.

Private names of transformers used here: `GGUF_CONFIG_MAPPING`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from moe_infinity.checkpoint.gguf_file import GgufModel
from moe_infinity.errors import CheckpointError, UnsupportedModelError

NOT_SIZES = (
    "max_position_embeddings",
    "sliding_window",
    "rope_theta",
)  # may be larger than any tensor
WITH_CONFIG = (
    "hint: `--config FOLDER` (in Python config_from=) names a folder or hub id that has the config "
    "and, if it has one, the tokenizer"
)


@dataclass(frozen=True, slots=True)
class Known:
    """An architecture whose metadata are enough."""

    model_type: str  # of transformers
    like: str  # its entry in transformers' table of metadata
    more: dict[str, str] = field(default_factory=dict)  # what the entry lacks
    fixed: dict[str, Any] = field(default_factory=dict)  # what no metadata say
    yarn: dict[str, Any] | None = None  # what metadata do not say of it; None: it is not expected


KNOWN = {
    "qwen2moe": Known(
        "qwen2_moe",
        "qwen2_moe",
        {
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
    ),
    "qwen3moe": Known(
        "qwen3_moe",
        "qwen3_moe",
        {"expert_feed_forward_length": "moe_intermediate_size"},
        {"norm_topk_prob": True},
    ),
    "llama": Known(
        "mixtral",
        "llama",
        {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    ),
    "olmoe": Known("olmoe", "qwen2_moe"),
    "granitemoe": Known(
        "granitemoe",
        "qwen2",
        {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "gpt-oss": Known(
        "gpt_oss",
        "gpt_oss",
        {"attention.key_length": "head_dim", "attention.sliding_window": "sliding_window"},
        yarn={"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
}


def config_of(gguf: GgufModel) -> Any:
    """transformers' config of a model. Raises UnsupportedModelError where the metadata are not
    enough, CheckpointError where they cannot be true.
    """
    where = gguf.files[0]
    known = KNOWN.get(gguf.architecture)
    if known is None:
        raise UnsupportedModelError(
            f"{where}: the metadata of a {gguf.architecture} model do not say all of its config; "
            f"those of {', '.join(KNOWN)} do\n{WITH_CONFIG}"
        )
    found = _mapped(gguf, known) | _from_tensors(gguf)
    found |= {"rope_parameters": _rope(gguf, known, found.pop("rope_theta", 10000.0))}
    ids, ends = gguf.vocabulary.ids, gguf.vocabulary.ends()
    found |= {
        "bos_token_id": ids.get("bos"),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
        "pad_token_id": ids.get("pad"),
    }
    try:
        return transformers.AutoConfig.for_model(known.model_type, **found)
    except Exception as error:  # each config class checks in its own way
        raise UnsupportedModelError(f"{where}: no config can be made of it: {error}") from error


def _mapped(gguf: GgufModel, known: Known) -> dict[str, Any]:
    """The fields of the config that the metadata name. A size is refused that no tensor of the
    model can have.
    """
    largest = max(max(tensor.shape) for tensor in gguf.tensors.values())
    found = dict(known.fixed)
    for key, name in (GGUF_CONFIG_MAPPING[known.like] | known.more).items():
        value = gguf.value(key)
        if name is None or value is None:
            continue
        is_size = type(value) is int and name not in NOT_SIZES
        if type(value) not in (int, float, bool) or (is_size and not 0 < value <= largest):
            raise CheckpointError(f"{gguf.files[0]}: {gguf.architecture}.{key} is {value!r:.40}")
        found[name] = value
    return found


def _from_tensors(gguf: GgufModel) -> dict[str, Any]:
    """The fields of the config that follow from the tensors, which cannot lie."""
    embeddings = gguf.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise CheckpointError(f"{gguf.files[0]}: no tensor token_embd.weight")
    vocab_size, hidden_size = embeddings.shape
    return {
        "num_hidden_layers": gguf.num_blocks,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }


def _rope(gguf: GgufModel, known: Known, theta: float) -> dict[str, Any]:
    kind = gguf.value("rope.scaling.type", "none")
    if any(name.startswith("rope_") for name in gguf.tensors):  # factors, which no config has
        kind = "a tensor"
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind != "yarn" or known.yarn is None:
        raise UnsupportedModelError(
            f"{gguf.files[0]}: positions scaled by {kind!r}, of which the metadata do not say all"
            f"\n{WITH_CONFIG}"
        )
    return known.yarn | {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": gguf.value("rope.scaling.factor", 1.0),
        "original_max_position_embeddings": gguf.value("rope.scaling.original_context_length"),
    }
