"""Limits of what config.json and generation_config.json may say, checked before anything is made of
them: a number that no model has costs no memory and no time.

A key is looked up by its name, wherever it stands: in the config of a part of the model, in a list
with a value for each layer. The limits are far beyond all models that are known, and other keys are
free within ANY_NUMBER.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from transformers.activations import ACT2FN

from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.printable import printable

MAX_FILE_BYTES = 16 << 20
MAX_DEPTH = 16
MAX_VALUES = 200_000
MAX_SHOWN = 60  # characters of a value in an error
# All layers together. Each may be an object of its own, which takes a millisecond to make.
MAX_EXPERTS = 1 << 20
MAX_MODULES = 400_000  # 10 s and 1 GB; a Switch of 2048 experts has half as many


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


class NumberRange(NamedTuple):
    """The numbers that a key may have."""

    low: float
    high: float
    is_whole: bool = True

    def __str__(self) -> str:
        kind = "a whole number" if self.is_whole else "a number"
        return f"{kind} from {_plain(self.low)} to {_plain(self.high)}"

    def has(self, value: Any) -> bool:
        """Return True for a number of this range; Infinity and NaN are in none."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:
            return False
        return not self.is_whole or isinstance(value, int) or value.is_integer()


class OneOf(NamedTuple):
    """The values that a key without numbers may have."""

    what: str
    values: Container[Any]

    def __str__(self) -> str:
        return self.what

    def has(self, value: Any) -> bool:
        return value in self.values


class AnyNumber(NumberRange):
    """The numbers that a key without a limit may have; what is no number is not looked at."""

    def has(self, value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return not (is_number and abs(value) < math.inf) or super().has(value)


Limit = NumberRange | OneOf


class Rule(NamedTuple):
    """The values that the keys of a pattern may have, alone or in lists that are so many deep."""

    keys: re.Pattern[str]
    limit: Limit
    depths: range = range(3)  # a value for each layer, or for each part of each layer
    may_be_object: bool = True  # with keys that have limits of their own

    def allows(self, value: Any) -> bool:
        """Return True for a value of the right kind; what is in a list is looked at by itself."""
        return self.may_be_object if isinstance(value, dict) else _depth(value) in self.depths


def setting(keys: str, limit: Limit, depths: range = range(1)) -> Rule:
    """Return the rule of a setting of generation."""
    return Rule(re.compile(keys), limit, depths, may_be_object=False)


LAYERS = re.compile(r"(num|n)_(\w+_)?layers?|(\w+_)?num_(hidden_)?layers|(en|de)coder_layers")
EXPERTS = re.compile(r"(moe_)?(num|n)_(local_|routed_)?experts")
SIZE = NumberRange(0, 1 << 27)
TOKEN = NumberRange(-10_000, 1 << 27)
SHARE = NumberRange(0, 1, is_whole=False)
FACTOR = NumberRange(-1e9, 1e9, is_whole=False)
FLAG = OneOf("true or false", (True, False))
# Configs of transformers put another in the place of the last, which MiniMax and Step publish.
ACTIVATION = OneOf("an activation that transformers knows", {*ACT2FN, "swigluoai"})
# The first rule whose pattern the whole key matches decides.
MODEL = (
    Rule(re.compile(r"(num_)?hidden_layers|n_layers?|num_layers"), NumberRange(1, 1024)),
    Rule(LAYERS, NumberRange(0, 1024)),
    Rule(EXPERTS, NumberRange(0, 1 << 16)),
    Rule(re.compile(r"(num_)?experts_per_tok(en)?|moe_top_?k"), NumberRange(1, 1 << 12)),
    Rule(re.compile(r"num_attention_heads|n_heads?|num_heads"), NumberRange(1, 1 << 16)),
    Rule(re.compile(r"\w*(num|n)_(\w+_)?heads"), NumberRange(0, 1 << 16)),
    Rule(re.compile(r"hidden_size|vocab_size|d_model|n_embd"), NumberRange(1, 1 << 24)),
    Rule(re.compile(r"(\w+_)?(hidden|intermediate|vocab|embedding|ffn)_(size|dim)"), SIZE),
    Rule(re.compile(r"(\w+_)?(head_dim|lora_rank)|d_(ff|kv|inner)|ffn_dim"), SIZE),
    Rule(re.compile(r"(original_)?max_position_embeddings|n_positions"), NumberRange(-1, 1e30)),
    Rule(re.compile(r"sliding_window"), NumberRange(-1, 1 << 62)),
    Rule(re.compile(r"(\w+_)?rope_theta"), NumberRange(0, 1e15, is_whole=False)),
    Rule(re.compile(r"(\w+_)?eps(ilon)?"), SHARE),
    Rule(re.compile(r"dropout|(attention|attn|hidden|resid|embd)_(dropout|pdrop)"), SHARE),
    Rule(re.compile(r"(\w+_)?factor|initializer_range"), FACTOR),
    Rule(re.compile(r"hidden_act|hidden_activation|activation_function"), ACTIVATION),
    Rule(re.compile(r"use_cache|tie_word_embeddings|norm_topk_prob|is_encoder_decoder"), FLAG),
)
GENERATION = (
    setting(r"\w+_token_ids?|(begin_)?suppress_tokens", TOKEN, range(2)),
    setting(r"bad_words_ids|force_words_ids", TOKEN, range(2, 3)),
    setting(r"temperature", NumberRange(0, 1e4, is_whole=False)),
    setting(r"top_k", NumberRange(-1, 1 << 30)),
    setting(r"top_p|min_p|typical_p|epsilon_cutoff|eta_cutoff", SHARE),
    setting(r"(encoder_)?repetition_penalty", NumberRange(1e-3, 1e3, is_whole=False)),
    setting(r"length_penalty|diversity_penalty|penalty_alpha|guidance_scale", FACTOR),
    setting(r"(max|min)_(new_tokens|length)", NumberRange(-1, 1 << 40)),
    setting(r"(encoder_)?no_repeat_ngram_size", NumberRange(0, 64)),
    setting(r"num_beams|num_beam_groups|num_return_sequences", NumberRange(1, 1 << 12)),
    setting(r"do_sample|renormalize_logits|remove_invalid_values", FLAG),
)
RULES = MODEL + GENERATION
RANK = AnyNumber(-1, 1 << 12, is_whole=False)
# Of PEFT. All weights of an adapter are made before its file is read.
ADAPTER = (
    Rule(re.compile(r"(init_|target_)?r|\w*rank\w*|num_virtual_tokens"), RANK),
    Rule(re.compile(r"\w+_(size|dim|layers)"), AnyNumber(-1, 1 << 20)),
)
# A picture is made that large. Some classes have numbers of pixels under the names of edges.
PROCESSOR = (
    Rule(re.compile(r"\w*(height|width|patch(es)?|patch_size)|num_\w+"), AnyNumber(-1, 1 << 14)),
    Rule(re.compile(r"\w*(pixels|edge|size|length)"), AnyNumber(-1, 1 << 26)),
)
ANY_NUMBER = AnyNumber(-(1 << 62), 1 << 62, is_whole=False)
ANYTHING = Rule(re.compile(""), ANY_NUMBER, range(MAX_DEPTH))
PACKING = ("quantization_config", "compression_config")  # formats/methods.py looks at these
HUB_KERNEL = re.compile(r"_*(attn|experts)_implementation\w*|kernel_config|use_kernels?")


class ConfigEntry(NamedTuple):
    """A value that is no object, and where it stands."""

    path: str
    key: str
    value: Any


def read_object(
    file: Path,
    max_bytes: int = MAX_FILE_BYTES,
    max_depth: int = MAX_DEPTH,
    max_values: int = MAX_VALUES,
) -> dict[str, Any]:
    """Return the JSON object of a file. Raises CheckpointError for anything else, and for one that
    is larger, deeper or has more values than any that is known.
    """
    too_deep = f"{file}: is nested more than {max_depth} deep"
    try:
        num_bytes = file.stat().st_size
        content = json.loads(file.read_text("utf-8")) if num_bytes <= max_bytes else None
    except RecursionError as error:
        raise CheckpointError(too_deep) from error
    except ValueError as error:
        raise CheckpointError(f"{file}: not a JSON file: {printable(error)}") from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    if num_bytes > max_bytes:
        raise CheckpointError(f"{file}: has {num_bytes} bytes, expected at most {max_bytes}")
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    parts: list[Any] = [content]
    num_values = 0
    for _ in range(max_depth):  # one level after the other
        num_values += sum(map(len, parts))
        if num_values > max_values:
            raise CheckpointError(f"{file}: has more than {max_values} values")
        parts = [each for part in parts for each in _inside(part) if isinstance(each, dict | list)]
    if parts:
        raise CheckpointError(too_deep)
    return content


def _inside(part: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return part.values() if isinstance(part, dict) else part


def check_config(file: Path, content: dict[str, Any], *, trust_remote_code: bool) -> None:
    """Raise CheckpointError for a value that no model has, UnsupportedModelError for code of the
    hub that the user does not trust.
    """
    largest = {LAYERS: 1.0, EXPERTS: 0.0}
    for path, key, value in _entries(content):
        if not trust_remote_code and HUB_KERNEL.fullmatch(key) and "/" in str(value):
            raise UnsupportedModelError(
                f"{file}: {path} names a kernel of the hub, {shown(value)}: code that would be "
                "downloaded and run\nhint: --trust-remote-code allows it"
            )
        _check(file, ConfigEntry(path, key, value), RULES)
        for pattern in largest:
            if pattern.fullmatch(key):
                numbers = (each for each in _flat(value) if isinstance(each, int | float))
                largest[pattern] = max(largest[pattern], *numbers, 0)
    if math.prod(largest.values()) > MAX_EXPERTS:
        layers, experts = largest.values()
        raise CheckpointError(
            f"{file}: {layers:g} layers of {experts:g} experts, expected at most {MAX_EXPERTS} "
            "experts in all"
        )


def check_generation_config(file: Path, content: dict[str, Any]) -> None:
    """Raise CheckpointError for a setting that cannot be kept."""
    for entry in _entries(content):
        _check(file, entry, GENERATION)


def check_adapter_config(file: Path, content: dict[str, Any]) -> None:
    """Raise CheckpointError for a size of an adapter that none has."""
    for entry in _entries(content):
        is_rank = entry.path.startswith("rank_pattern.")  # its keys are names of modules
        _check(file, entry._replace(key="r") if is_rank else entry, ADAPTER)


def check_processor_config(file: Path, content: dict[str, Any]) -> None:
    """Raise CheckpointError for a size that no picture is made to have."""
    for entry in _entries(content):
        _check(file, entry, PROCESSOR)


def as_meant(key: str, value: Any) -> Any:
    """Return a setting of generation in the type that transformers asks for: JSON has one kind of
    numbers.
    """
    if isinstance(value, list):
        return [as_meant(key, each) for each in value]
    limit = next((rule.limit for rule in GENERATION if rule.keys.fullmatch(key)), None)
    if isinstance(limit, NumberRange) and isinstance(value, int | float):
        return int(value) if limit.is_whole else float(value)
    return bool(value) if limit == FLAG and value is not None else value


def _entries(content: dict[str, Any], prefix: str = "") -> Iterator[ConfigEntry]:
    """Every key with its value, and those of the objects in it."""
    for key, value in content.items():
        path = prefix + printable(key, MAX_SHOWN)
        yield ConfigEntry(path, key, value)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict) and key not in PACKING:
                yield from _entries(part, f"{path}.")


def _check(file: Path, entry: ConfigEntry, rules: tuple[Rule, ...]) -> None:
    """Raise CheckpointError if a value, or one of a list, is not what its key may have."""
    path, key, value = entry
    rule = next((rule for rule in rules if rule.keys.fullmatch(key)), ANYTHING)
    if value is None or value == []:
        return
    if not rule.allows(value):
        raise CheckpointError(f"{file}: {path} is {shown(value)}, expected {rule.limit}")
    for each in _flat(value):
        if not isinstance(each, dict) and not rule.limit.has(each):
            raise CheckpointError(f"{file}: {path} has {shown(each)}, expected {rule.limit}")


def _depth(value: Any) -> int:
    """Return how many lists are around the values: 0 for a value alone."""
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list) else 0


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def shown(value: Any) -> str:
    """A value in an error."""
    return printable(repr(value), MAX_SHOWN)


@contextmanager
def few_modules(checkpoint: str) -> Iterator[None]:
    """Inside, a model is built. Raises CheckpointError once it has more modules than any: its
    config has a number that no limit here knows.
    """
    numbers = itertools.count(1)

    def count(module: nn.Module, name: str, part: nn.Module | None) -> None:
        if next(numbers) > MAX_MODULES:
            raise CheckpointError(
                f"{checkpoint}: its config.json asks for more than {MAX_MODULES} modules"
            )

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
