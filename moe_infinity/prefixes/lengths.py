"""Which lengths of sequences a model computes alike.

Its rotary embedding may be another one beyond some length (LongRoPE) or at every length (dynamic
NTK). All keys of a sequence then belong to its *regime*: generate() computes a prompt in that of
the whole prompt, so chunks and kept prefixes of another regime would change the answer. In a batch
transformers takes one embedding for all rows, that of the longest.

Llama 4 scales queries by a position that it counts from the cache, padding included.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator
from typing import Any

import torch
import transformers
from transformers.cache_utils import DynamicCache

from moe_infinity.architectures.attention_inputs import cache_in, cache_parameter

logger = logging.getLogger(__name__)
SAME_AT_ALL_LENGTHS = ("default", "linear", "yarn", "llama3", "mrope", "proportional")
TWO_EMBEDDINGS = ("longrope", "su")
Fresh = tuple[Any, dict[str, Any], dict[str, Any]]  # a module, its attributes and buffers
LENGTH_NAMES = ("max_position_embeddings", "max_seq_len", "n_positions", "model_max_length")
LONGEST = 1 << 24  # tokens of a sequence: memory has no room for the keys of more
GROWN = "max_seq_len_cached"  # how long a sequence a rotary embedding was made for


class Lengths:
    """The lengths that one model computes alike. A length counts the newest token."""

    def __init__(self, model: Any) -> None:
        """The model must not have computed a long sequence yet."""
        config = model.config.get_text_config(decoder=True)
        self._borders: set[int] = set()  # the longest sequences before another embedding
        self._alike: int | None = None  # beyond it no two lengths compute alike
        for kind in rope_kinds(config):
            self._note(kind, config)
        self._tokens_per_scale = 0
        if getattr(config, "attn_temperature_tuning", False):
            self._tokens_per_scale = int(getattr(config, "floor_scale", 0))
        reached = [border for border in self._borders if border <= LONGEST]
        self._anew = {border: num_anew(model, border) for border in reached}
        self._fresh: list[Fresh] = []
        if self._alike is not None:
            self._fresh = list(_fresh_rotations(model))
        for border, num_tokens in self._anew.items():
            if num_tokens == 1:
                logger.warning(
                    "answers that grow beyond %d tokens lose their context, as in generate(): "
                    "there transformers %s drops the KV cache of this model",
                    border,
                    transformers.__version__,
                )

    def _note(self, kind: dict[str, Any], config: Any) -> None:
        name = _name_of(kind)
        trained = getattr(config, "max_position_embeddings", 0)
        original = (
            kind.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or trained
        )
        if name in TWO_EMBEDDINGS:
            self._borders.add(int(original))
        elif name not in SAME_AT_ALL_LENGTHS:
            first = min(original, trained) if "dynamic" in name else 0
            self._alike = first if self._alike is None else min(self._alike, first)

    def regime(self, length: int) -> Hashable:
        """Return what is equal for lengths whose keys are computed alike."""
        own = length if self._alike is not None and length > self._alike else 0
        return own, sum(length > border for border in self._borders)

    def group(self, length: int) -> Hashable:
        """Return what is equal for sequences that may decode in one batch."""
        scale = length // self._tokens_per_scale if self._tokens_per_scale else 0
        return self.regime(length), scale

    def is_usual(self, length: int) -> bool:
        """Return True if a sequence of this length computes as shorter ones do."""
        return self.regime(length) == self.regime(1)

    @property
    def begins_anew(self) -> bool:
        """True if some answers go on without the cache of their tokens, see `num_anew`."""
        return any(self._anew.values())

    def num_anew(self, num_cached: int, length: int) -> int:
        """Return of how many tokens the step that reaches this length computes keys and values
        anew, because generate() goes on without the cache of this many tokens; 0 if it keeps it.
        """
        for border, num_tokens in self._anew.items():
            if num_tokens and num_cached <= border < length:
                return 1 if num_tokens == 1 else length
        return 0

    def forget(self) -> None:
        """Let the next pass compute as if the model had seen no other sequence."""
        for module, attributes, buffers in self._fresh:
            for name in _plain_names(module):
                if name not in attributes:
                    delattr(module, name)
            for name, value in attributes.items():
                setattr(module, name, value)
            module._buffers = dict(buffers)


def rope_kinds(config: Any) -> list[dict[str, Any]]:
    """Return the parameters of a text model's rotary embeddings, one for each kind of layer."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    inner = [kind for kind in found.values() if isinstance(kind, dict)]
    return inner or ([found] if found else [])


def longest_context(config: Any) -> int | None:
    """Return the most tokens that a text model was made for; None if its config does not say."""
    trained = next((n for name in LENGTH_NAMES if (n := getattr(config, name, None))), None)
    if trained is None:
        return None
    found = [int(trained)]
    for kind in rope_kinds(config):
        original = kind.get("original_max_position_embeddings")
        if original is None and "dynamic" in _name_of(kind):
            original = trained
        found.append(int((original or 0) * (kind.get("factor") or 1.0)))
    return max(found)


def has_growing_context(config: Any) -> bool:
    """Return True if the rotary embedding stretches to any length."""
    return any("dynamic" in _name_of(kind) for kind in rope_kinds(config))


def _name_of(kind: dict[str, Any]) -> str:
    return str(kind.get("rope_type", kind.get("type", "default")))


class _Filled(DynamicCache):  # type: ignore[misc]
    """Says that it has tokens."""

    num_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens


def num_anew(model: Any, num_tokens: int) -> int:
    """Return how many tokens generate() gives the model for the next one, if it does not give it
    its cache of this many tokens; 0 if it does.
    """
    cache = _Filled(config=model.config)
    cache.num_tokens = num_tokens
    ids = torch.zeros((1, num_tokens + 1), dtype=torch.long, device="cpu")
    prepare = model.prepare_inputs_for_generation
    given = {cache_parameter(prepare): cache, "attention_mask": torch.ones_like(ids)}
    inputs = prepare(ids, next_sequence_length=1, **given)
    return 0 if cache_in(inputs) is cache else inputs["input_ids"].shape[1]


def _fresh_rotations(model: Any) -> Iterator[Fresh]:
    """Yield the modules that remember the longest sequence, with what they have now."""
    for module in model.modules():
        if GROWN in vars(module):
            attributes = {name: vars(module)[name] for name in _plain_names(module)}
            yield module, attributes, dict(module._buffers)


def _plain_names(module: Any) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_") and name != "training"]
