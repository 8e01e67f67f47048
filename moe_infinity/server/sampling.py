"""The next token of one sequence: what its grammar allows, and what its settings choose.

logits [V] float32 --processors--> scores --Sampler--> a token, with log-probabilities if asked for
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from moe_infinity.errors import MoEInfinityError

ROWS = 64  # of a prompt's logits that are in float32 at a time


class ConstraintFailed(MoEInfinityError):
    """A grammar became too complex while an answer was generated, or no token is allowed by both
    the grammar and the settings.
    """


class Constraint(LogitsProcessor):  # type: ignore[misc]
    """The grammar of one sequence, and how far the sequence has come in it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._forbidden_V: NDArray[np.bool_] | None = None  # behind the last token, if known
        self.num_masks = 0
        self.masking_s = 0.0  # for all of them

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask scores [1, V], behind all that may have changed those of forbidden tokens."""
        self.mask(scores[0])
        if bool((scores[0] == -math.inf).all()):
            raise ConstraintFailed("the settings suppress every token that the grammar allows")
        return scores

    def mask(self, logits_V: Tensor) -> None:
        """Set the logits of tokens that are not allowed to minus infinity.

        Raises ConstraintFailed.
        """
        if self._forbidden_V is None:
            self._forbidden_V = self._find_forbidden(len(logits_V))
        # By numpy: torch would wait for its other threads, which a busy machine delays.
        logits_V.numpy()[self._forbidden_V] = -math.inf

    def _find_forbidden(self, vocab_size: int) -> NDArray[np.bool_]:
        """[V], True for what the grammar does not allow next."""
        began = time.perf_counter()
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._require_no_error()
        allowed_V = np.unpackbits(packed, count=vocab_size, bitorder="little")
        forbidden_V: NDArray[np.bool_] = allowed_V == 0
        if forbidden_V.all():
            raise ConstraintFailed("no token of the vocabulary is allowed by the grammar")
        self.num_masks += 1
        self.masking_s += time.perf_counter() - began
        return forbidden_V

    def take(self, token_id: int) -> None:
        """Go on behind a token that was allowed. Raises ConstraintFailed."""
        self._forbidden_V = None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of a request are chosen; None: as the checkpoint says."""

    temperature: float | None = None  # 0 takes the likeliest
    top_p: float | None = None
    top_k: int | None = None  # 0: all
    min_p: float | None = None
    repetition_penalty: float | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    no_repeat_ngram_size: int | None = None  # 0: any may come again
    min_tokens: int | None = None  # before a token may end the answer
    stop_token_ids: tuple[int, ...] = ()  # end the answer, as the checkpoint's end tokens do
    ignore_eos: bool = False  # the checkpoint's end tokens do not
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: a random one
    num_logprobs: int | None = None  # alternatives per token; None: no log-probabilities at all


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """The bias and the penalties of OpenAI's API, which count what was generated."""

    def __init__(self, sampling: Sampling, num_prompt: int) -> None:
        self._frequency = sampling.frequency_penalty or 0.0
        self._presence = sampling.presence_penalty or 0.0
        self._num_prompt = num_prompt
        biases = sampling.logit_bias
        self._biased = torch.tensor(list(biases), dtype=torch.long, device="cpu")
        self._biases = torch.tensor(list(biases.values()), dtype=torch.float32, device="cpu")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Change scores [1, V] of the token behind ids [1, T]."""
        scores[0, self._biased] += self._biases
        if self._frequency or self._presence:
            ids, times = input_ids[0, self._num_prompt :].unique(return_counts=True)
            scores[0, ids] -= self._frequency * times + self._presence
        return scores


class NoRepeatedNgrams(LogitsProcessor):  # type: ignore[misc]
    """Forbids what transformers' NoRepeatNGramLogitsProcessor does, without reading all ids again
    for each token. Those of the prompt are looked at for the first: what waits takes no memory.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._followers: dict[tuple[int, ...], list[int]] = {}  # by the size - 1 tokens before
        self._ids: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Forbid, in scores [1, V], what would end an n-gram that ids [1, T] have."""
        self._add(input_ids[0, len(self._ids) :].tolist())
        begun = tuple(self._ids[len(self._ids) - self._size + 1 :])
        scores = scores.clone()
        scores[0, self._followers.get(begun, [])] = -math.inf
        return scores

    def _add(self, ids: Sequence[int]) -> None:
        for token_id in ids:
            if len(self._ids) >= self._size - 1:
                before = tuple(self._ids[len(self._ids) - self._size + 1 :])
                self._followers.setdefault(before, []).append(token_id)
            self._ids.append(token_id)


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
        self,
        processors: Sequence[LogitsProcessor],
        prompt_ids: Sequence[int] = (),
        *,
        takes_likeliest: bool = False,
        seed: int | None = None,  # None: a random one
        num_logprobs: int | None = None,
        constraint: Constraint | None = None,  # one of the processors
    ) -> None:
        self._processors = LogitsProcessorList(processors)
        self._ids_1T = NO_IDS_1T  # prompt and output, for processors
        if self._processors:
            self._ids_1T = torch.tensor([prompt_ids], dtype=torch.long, device="cpu")
        self._takes_likeliest = takes_likeliest
        self._num_logprobs = num_logprobs
        self._constraint = constraint
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def choose(self, logits_V: Tensor) -> ChosenToken:
        """Choose the next token. Changes `logits_V`. Raises ConstraintFailed."""
        logits_V = logits_V.to(dtype=torch.float32)
        logprobs_V = None
        if self._num_logprobs is not None:
            if self._constraint is not None:
                self._constraint.mask(logits_V)
            logprobs_V = logits_V.log_softmax(dim=-1)
        scores_1V = self._processors(self._ids_1T, logits_V[None])
        if self._takes_likeliest:
            token_id = int(scores_1V.argmax(dim=-1))
        else:
            chances_1V = scores_1V.softmax(dim=-1)
            token_id = int(torch.multinomial(chances_1V, 1, generator=self._generator))
        self._remember(token_id)
        if logprobs_V is None:
            return ChosenToken(token_id)
        return with_logprobs([token_id], logprobs_V[None], self._num_logprobs or 0)[0]

    def _remember(self, token_id: int) -> None:
        if self._constraint is not None:
            self._constraint.take(token_id)
        if self._processors:
            chosen_11 = torch.tensor([[token_id]], dtype=torch.long, device="cpu")
            self._ids_1T = torch.cat([self._ids_1T, chosen_11], dim=1)


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
