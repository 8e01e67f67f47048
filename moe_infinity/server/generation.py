"""How an answer is generated: what its request says, else what generation_config.json says.

transformers makes the processors of logits, so each setting means what it means in generate().
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
)

from moe_infinity.errors import ConfigError
from moe_infinity.server.sampling import NoRepeatedNgrams, Penalties, Sampling
from moe_infinity.streaming import unstreamed

COLDEST = 1e-28  # dividing logits by less overflows; one token has probability 1 long before
# What a request may leave out, and what it is if the checkpoint does not say it either.
FILLED: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    # Not of transformers: model cards recommend them, and some checkpoints say them.
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
HINT = "\nhint: take it out of generation_config.json, or use generate()"


@dataclass(frozen=True, slots=True)
class Settings:
    """Those of one answer."""

    processors: LogitsProcessorList
    takes_likeliest: bool
    end_ids: frozenset[int]
    stops: tuple[str, ...]
    max_time: float | None  # seconds, from when its prompt is begun


class Generation:
    """Makes the settings of answers. It reads the model's `generation_config` each time.

    Raises ConfigError for what the checkpoint asks for and the server cannot do.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._require_possible()

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids of the tokens that end an answer; none if the checkpoint names none."""
        ends = self._model.generation_config.eos_token_id
        if ends is None:
            return frozenset()
        return frozenset([ends] if isinstance(ends, int) else ends)

    def max_new_tokens(self, num_prompt: int) -> int | None:
        """The most tokens of an answer behind a prompt of this many, if the checkpoint says it."""
        config = self._model.generation_config
        if config.max_new_tokens is not None or config.max_length is None:
            return config.max_new_tokens  # type: ignore[no-any-return]
        return max(int(config.max_length) - num_prompt, 1)

    def filled(self, sampling: Sampling) -> Sampling:
        """Return a request's settings with the checkpoint's for what it leaves out, else 1 and no
        filter.
        """
        return _filled(self._model.generation_config, sampling)

    def settings(
        self,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        stops: tuple[str, ...] = (),
        constraints: Sequence[LogitsProcessor] = (),
    ) -> Settings:
        """Return the settings of an answer. Raises ValueError for a value that transformers does
        not take.
        """
        end_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            end_ids |= self.end_ids
        sampling = self.filled(sampling)
        config = _merged(self._model.generation_config, sampling)
        config.max_length = len(prompt_ids) + max_new_tokens
        config._eos_token_tensor = _ids_tensor(sorted(end_ids)) if end_ids else None
        if not end_ids:
            config.exponential_decay_length_penalty = None  # it makes an end token likelier
        processors: list[Any] = []
        if sampling.logit_bias or sampling.frequency_penalty or sampling.presence_penalty:
            processors.append(Penalties(sampling, len(prompt_ids)))
        processors += constraints
        return Settings(
            processors=self._processors(config, prompt_ids, processors),
            takes_likeliest=not config.do_sample,
            end_ids=end_ids,
            stops=stops + _stops_of(config),
            max_time=config.max_time,
        )

    def _processors(
        self, config: GenerationConfig, prompt_ids: Sequence[int], own: list[Any]
    ) -> LogitsProcessorList:
        """Return transformers' processors, with our own before those that only sampling has."""
        found = self._model._get_logits_processor(
            config,
            input_ids_seq_length=len(prompt_ids),
            encoder_input_ids=_ids_tensor(prompt_ids)[None],
            logits_processor=LogitsProcessorList(own),
            device="cpu",
        )
        for at, each in enumerate(found):
            if type(each) is NoRepeatNGramLogitsProcessor:
                found[at] = NoRepeatedNgrams(each.ngram_size)
        return found

    def _require_possible(self) -> None:
        config = self._model.generation_config
        for name in unserved(config):
            raise ConfigError(
                f"the checkpoint's {name} ({getattr(config, name)}) is not served{HINT}"
            )
        for name, value in vars(config).items():
            if value is not None:
                self._try(name, value)

    def _try(self, name: str, value: Any) -> None:
        """Raise ConfigError, which names it, if transformers does not take a setting."""
        alone = GenerationConfig()
        setattr(alone, name, value)
        config = _merged(alone, _filled(alone, Sampling(temperature=1.0)))
        config.max_length = 2
        config._eos_token_tensor = _ids_tensor([0])
        vocab_size = self._model.config.get_text_config().vocab_size
        scores_1V = torch.zeros((1, vocab_size), dtype=torch.float32, device="cpu")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._processors(config, [0], [])(_ids_tensor([0])[None], scores_1V)
        except Exception as error:  # each processor checks in its own way
            raise ConfigError(
                f"the checkpoint's {name} ({value}) is not valid: {error}{HINT}"
            ) from error


def unserved(config: GenerationConfig) -> list[str]:
    """Names of the settings that shape an answer in a way that the server cannot."""
    found: list[str] = []
    if config.guidance_scale not in (None, 1, 1.0):
        found.append("guidance_scale")
    if config.token_healing:
        found.append("token_healing")
    return found + unstreamed(config)


def _filled(config: GenerationConfig, sampling: Sampling) -> Sampling:
    missing = [name for name in FILLED if getattr(sampling, name) is None]
    own: dict[str, Any] = {name: getattr(config, name, None) for name in missing}
    if config.do_sample is False and "temperature" in own:
        own["temperature"] = 0.0
    found = {name: FILLED[name] if value is None else value for name, value in own.items()}
    return replace(sampling, **found)


def _merged(config: GenerationConfig, sampling: Sampling) -> GenerationConfig:
    """The checkpoint's settings with those of a request that is filled in."""
    merged = copy(config)
    merged.do_sample = (sampling.temperature or 0.0) >= COLDEST
    for name in FILLED:
        setattr(merged, name, getattr(sampling, name))
    merged.top_k = max(merged.top_k, 0)  # clients write -1 for all
    merged.min_p = merged.min_p or None  # which costs nothing
    if sampling.min_tokens is not None:
        merged.min_length = None
        merged.min_new_tokens = sampling.min_tokens
    return merged


def _ids_tensor(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.long, device="cpu")


def _stops_of(config: GenerationConfig) -> tuple[str, ...]:
    stops = config.stop_strings or ()
    return (stops,) if isinstance(stops, str) else tuple(stops)
