"""The next token of one sequence: what its grammar allows, and what its settings choose.

logits [V] float32 --Constraint--> allowed --Sampler--> a token, with log-probabilities if asked for
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from moe_infinity.errors import MoEInfinityError

ROWS = 64  # of a prompt's logits that are in float32 at a time


class ConstraintFailed(MoEInfinityError):
    """A grammar became too complex while an answer was generated, or allows no token at all."""


class Constraint:
    """The grammar of one sequence, and how far the sequence has come in it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.num_masks = 0
        self.masking_s = 0.0  # for all of them

    def mask(self, logits_V: Tensor) -> None:
        """Set the logits of tokens that are not allowed to minus infinity.

        Raises ConstraintFailed.
        """
        began = time.perf_counter()
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._require_no_error()
        allowed_V = np.unpackbits(packed, count=len(logits_V), bitorder="little")
        if not allowed_V.any():
            raise ConstraintFailed("no token of the vocabulary is allowed by the grammar")
        # By numpy: torch would wait for its other threads, which a busy machine delays.
        logits_V.numpy()[allowed_V == 0] = -math.inf
        self.num_masks += 1
        self.masking_s += time.perf_counter() - began

    def take(self, token_id: int) -> None:
        """Go on behind a token that was allowed. Raises ConstraintFailed."""
        self._matcher.consume_token(token_id)
        self._require_no_error()

    @property
    def is_complete(self) -> bool:
        """True if nothing may follow."""
        stopped: bool = self._matcher.is_stopped()
        return stopped

    def _require_no_error(self) -> None:
        if self._matcher.is_error():
            raise ConstraintFailed(self._matcher.get_error())


COLDEST = 1e-28  # dividing logits by less overflows; one token has probability 1 long before


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of a request are chosen. Temperature 0 takes the likeliest."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int | None = None  # None: a random one
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_logprobs: int | None = None  # alternatives per token; None: no log-probabilities at all

    @property
    def is_greedy(self) -> bool:
        return self.temperature < COLDEST


@dataclass(frozen=True, slots=True)
class ChosenToken:
    """A token, and its log-probability among those that a constraint allows, before penalties, bias
    and temperature.
    """

    token_id: int
    logprob: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()  # (token id, logprob), the likeliest first


NO_IDS_1T = torch.empty((1, 0), dtype=torch.long, device="cpu")


class Sampler:
    """Chooses the tokens of one sequence, one after another."""

    def __init__(
        self, sampling: Sampling, prompt_ids: Sequence[int], constraint: Constraint | None = None
    ) -> None:
        self._sampling = sampling
        self._constraint = constraint
        self._generated: dict[int, int] = {}  # token id -> how often
        self._ids_T: Tensor | None = None  # prompt and output; None if no processor reads them
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._processors: list[Any] = []  # of transformers: (ids [1, T], scores [1, V]) -> scores
        if sampling.repetition_penalty != 1.0:
            self._processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
            self._ids_T = torch.tensor(prompt_ids, dtype=torch.long, device="cpu")
        if not sampling.is_greedy:
            self._add_warpers()

    def _add_warpers(self) -> None:
        """Add the filters in the order in which generate() applies them."""
        sampling = self._sampling
        if sampling.temperature != 1.0:
            self._processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k > 0:
            self._processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._processors.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0:
            self._processors.append(MinPLogitsWarper(sampling.min_p))

    def choose(self, logits_V: Tensor) -> ChosenToken:
        """Choose the next token. Changes `logits_V`. Raises ConstraintFailed."""
        logits_V = logits_V.to(dtype=torch.float32)
        if self._constraint is not None:
            self._constraint.mask(logits_V)
        logprobs_V = None
        if self._sampling.num_logprobs is not None:
            logprobs_V = logits_V.log_softmax(dim=-1)
        self._penalise(logits_V)
        scores_1V = logits_V[None]
        ids_1T = NO_IDS_1T if self._ids_T is None else self._ids_T[None]
        for processor in self._processors:
            scores_1V = processor(ids_1T, scores_1V)
        if not self._sampling.is_greedy:
            chances_1V = scores_1V.softmax(dim=-1)
            token_id = int(torch.multinomial(chances_1V, 1, generator=self._generator))
        else:
            token_id = int(scores_1V.argmax(dim=-1))
        self._remember(token_id)
        if logprobs_V is None:
            return ChosenToken(token_id)
        return with_logprobs([token_id], logprobs_V[None], self._sampling.num_logprobs or 0)[0]

    def _penalise(self, logits_V: Tensor) -> None:
        sampling = self._sampling
        for token_id, bias in sampling.logit_bias.items():
            logits_V[token_id] += bias
        if (sampling.frequency_penalty or sampling.presence_penalty) and self._generated:
            ids = torch.tensor(list(self._generated), dtype=torch.long, device="cpu")
            times = torch.tensor(list(self._generated.values()), dtype=torch.float32, device="cpu")
            logits_V[ids] -= sampling.frequency_penalty * times + sampling.presence_penalty

    def _remember(self, token_id: int) -> None:
        if self._constraint is not None:
            self._constraint.take(token_id)
        self._generated[token_id] = self._generated.get(token_id, 0) + 1
        if self._ids_T is not None:
            self._ids_T = torch.cat(
                [self._ids_T, torch.tensor([token_id], dtype=torch.long, device="cpu")]
            )


def with_logprobs(
    token_ids: Sequence[int], logprobs_TV: Tensor, num_alternatives: int
) -> list[ChosenToken]:
    """T tokens and the log-probabilities they had, each in its row."""
    ids_T1 = torch.tensor(token_ids, dtype=torch.long, device=logprobs_TV.device)[:, None]
    own = logprobs_TV.gather(1, ids_T1)[:, 0].tolist()
    best = logprobs_TV.topk(num_alternatives)
    alternatives = [
        tuple(zip(ids, map(finite, logprobs), strict=True))
        for ids, logprobs in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    return list(map(ChosenToken, token_ids, map(finite, own), alternatives))


def finite(logprob: float) -> float:
    """The log-probability, but at least -9999, as in OpenAI's API: JSON has no infinity."""
    return max(logprob, -9999.0) if not math.isnan(logprob) else -9999.0


def prompt_logprobs(
    logits_TV: Tensor, next_ids: Sequence[int], num_alternatives: int
) -> list[ChosenToken]:
    """The tokens that follow those of a chunk, with the log-probabilities that the chunk's logits
    give them. The last chunk of a prompt has one row more than tokens follow.
    """
    tokens: list[ChosenToken] = []
    for start in range(0, len(next_ids), ROWS):
        ids = next_ids[start : start + ROWS]
        rows_TV = logits_TV[start : start + len(ids)].to(dtype=torch.float32)
        tokens += with_logprobs(ids, rows_TV.log_softmax(dim=-1), num_alternatives)
    return tokens
