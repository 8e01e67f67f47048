"""A sequence, from a request to the engine to its last output.

A piece of text ends with a whole character and shows no stop string:
token ids --Detokenizer--> certain text --StopStrings--> text that may be shown
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import LogitsProcessor
from transformers.cache_utils import DynamicCache

from moe_infinity.detokenizer import UNFINISHED, Detokenizer
from moe_infinity.errors import MoEInfinityError
from moe_infinity.images.prompt import PromptImages
from moe_infinity.prefixes.prefix_tree import Branch
from moe_infinity.server.generation import Settings
from moe_infinity.server.sampling import ChosenToken, Constraint, Sampler, Sampling
from moe_infinity.server.thoughts import ThoughtBudget


class PartlySeen:
    """How much of a stop string a text ends with, as the text comes (Knuth, Morris and Pratt,
    SIAM J. Comput. 6(2), 1977): looking at each end of the text would take long for long stops.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self._num = 0
        self._shorter = [0]  # by characters seen - 1: the next shorter beginning that may be it
        for character in stop[1:]:
            self._shorter.append(self._longer(self._shorter[-1], character))

    def add(self, text: str) -> int:
        """Return how many characters of the stop string the text so far ends with. It must not have
        the whole of it.
        """
        for character in text:
            self._num = self._longer(self._num, character)
        return self._num

    def _longer(self, num: int, character: str) -> int:
        while num and self.stop[num] != character:
            num = self._shorter[num - 1]
        return num + (self.stop[num] == character)


class StopStrings:
    """Passes text on up to the first stop string. Keeps back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = list(map(PartlySeen, stops))
        self._kept = ""
        self.stop: str | None = None  # the stop string that ended the text

    def add(self, text: str) -> str:
        """Add text. Returns the text that may be shown."""
        new = text
        text = self._kept + new
        places = [(text.find(each.stop), each.stop) for each in self._stops if each.stop in text]
        if places:
            at, self.stop = min(places)
            self._kept = ""
            return text[:at]
        end = len(text) - max((each.add(new) for each in self._stops), default=0)
        self._kept = text[end:]
        return text[:end]

    def is_in(self, text: str) -> bool:
        """Return True if a stop string ends in this text, which is not added."""
        text = self._kept + text
        return any(each.stop in text for each in self._stops)

    def finish(self) -> str:
        """The text kept back, when no more text comes."""
        kept = self._kept
        self._kept = ""
        return kept


FinishReason = Literal["stop", "length"]
Pooling = Literal["mean", "last"]


class QueueFull(MoEInfinityError):
    """The queue has no free place. The client may try again later."""


class EngineStopped(MoEInfinityError):
    """The engine takes no more requests: it drains, was closed or has failed."""


class DeadlineExceeded(MoEInfinityError):
    """The request did not finish within `ServeConfig.deadline`."""


class NoEmbeddings(MoEInfinityError):
    """The model has no hidden states to make embeddings of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A sequence to generate, or a prompt to compute."""

    prompt_ids: Sequence[int]
    max_new_tokens: int  # with 0 it ends with its prompt
    images: PromptImages | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    owner: str = ""  # requests of one owner share prefixes
    client: str = ""  # clients take turns
    has_special: bool = False  # the text of special tokens is part of the answer's
    hidden_ids: frozenset[int] = frozenset()  # of tokens whose text is never part of it
    echo: bool = False  # the answer begins with the prompt
    # Of the answer; no other request has the same objects.
    constraint: Constraint | None = None
    budget: ThoughtBudget | None = None
    pooling: Pooling | None = None  # of the prompt's hidden states; None: no embedding

    @property
    def has_prompt_logprobs(self) -> bool:
        return self.echo and self.sampling.num_logprobs is not None

    @property
    def constraints(self) -> list[LogitsProcessor]:
        return [each for each in (self.constraint, self.budget) if each is not None]

    @property
    def reads_all(self) -> bool:
        """True if each token of the prompt has to be computed, known prefix or not."""
        return self.has_prompt_logprobs or self.pooling is not None


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token and where its text begins."""

    chosen: ChosenToken
    offset: int  # in characters of the answer


@dataclass(frozen=True, slots=True)
class Output:
    """The text and tokens that a step added to a sequence. The last output has a finish reason or
    an error.
    """

    text: str = ""
    tokens: tuple[TokenText, ...] = ()
    num_generated: int = 0  # tokens so far
    num_cached: int = 0  # tokens of the prompt that were not computed
    finish: FinishReason | None = None
    stop: str | None = None  # the stop string that was the reason
    embedding: tuple[float, ...] = ()  # of the prompt, with the last output if it was asked for
    error: BaseException | None = None

    @property
    def is_last(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt is."""

    num_tokens: int
    num_cached: int  # of these, known before
    num_read: int  # known or computed
    seconds: float  # since the request came


Deliver = Callable[[Output], None]  # called by the engine's thread: must neither block nor raise


def named_stops(tokenizer: Any, request: Request, stops: Sequence[str]) -> dict[int, str]:
    """Return those stop strings that are special tokens whose text is no part of the answer."""
    named = {}
    for stop in stops:
        token_id = tokenizer.convert_tokens_to_ids(stop)
        is_token = token_id is not None and tokenizer.convert_ids_to_tokens(token_id) == stop
        is_shown = request.has_special and token_id not in request.hidden_ids
        if is_token and not is_shown and not tokenizer.decode([token_id], skip_special_tokens=True):
            named[token_id] = stop
    return named


class Embedding:
    """The embedding of one sequence, as its chunks are computed."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._pooled_d: Tensor | None = None

    def add(self, hidden_Td: Tensor) -> None:
        """Add the last hidden states of a chunk."""
        hidden_Td = hidden_Td.to("cpu", dtype=torch.float32)
        if self._pooling == "last" or self._pooled_d is None:
            self._pooled_d = torch.zeros_like(hidden_Td[0])
        self._pooled_d += hidden_Td[-1] if self._pooling == "last" else hidden_Td.sum(dim=0)

    def unit(self) -> tuple[float, ...]:
        """It has unit length, so a mean is a sum."""
        assert self._pooled_d is not None
        return tuple(normalize(self._pooled_d, dim=0).tolist())


class Running:
    """A sequence, from its submission to its last output."""

    def __init__(
        self,
        request: Request,
        deliver: Deliver,
        *,
        tokenizer: Any,
        settings: Settings,
        deadline_s: float,
    ) -> None:
        self.request = request
        self.deadline = time.monotonic() + deadline_s
        self.began = math.inf  # when it got its seat
        self.is_cancelled = False  # set by any thread
        self.seat: int | None = None
        self.is_set_aside = False  # it decoded, and waits for a seat with its cache
        self.cache: DynamicCache | None = None  # its own, until it joins the batch
        self.branch: Branch | None = None  # None: no prefixes are kept
        self.is_known = False  # to the recorder, by an earlier step
        self.num_prefilled = 0  # of `ids`
        self.num_forgotten = 0  # of these, tokens that the cache never had
        self.num_cached = 0  # of these, tokens that were not computed
        self.num_echoed = 0  # of the prompt's tokens
        self.ids = list(request.prompt_ids)  # and of the answer
        self.embedding = None if request.pooling is None else Embedding(request.pooling)
        self._deliver = deliver
        self._end_ids = settings.end_ids
        self._max_time = settings.max_time
        self._sampler = Sampler(
            settings.processors,
            request.prompt_ids,
            takes_likeliest=settings.takes_likeliest,
            seed=request.sampling.seed,
            num_logprobs=request.sampling.num_logprobs,
            constraint=request.constraint,
        )
        self._detokenizer = Detokenizer(
            tokenizer, has_special=request.has_special, hidden_ids=request.hidden_ids
        )
        self._stops = StopStrings(settings.stops)
        self._named_stops = named_stops(tokenizer, request, settings.stops)
        self._num_generated = 0
        self._num_certain = 0  # characters
        self._num_decoded = 0  # characters, with those of the last tokens that may still change
        self._num_shown = 0  # characters
        self._tokens: deque[tuple[TokenText, int]] = deque()  # not yet shown, and where each ends
        self._last: Output | None = None

    @property
    def last_id(self) -> int:
        """The newest token, which the next pass gets."""
        return self.ids[-1]

    def begin_anew(self, num_tokens: int) -> None:
        """Compute this many of the last tokens again, and forget the others."""
        self.cache = None
        self.branch = None
        self.num_prefilled = self.num_forgotten = len(self.ids) - num_tokens

    @property
    def num_held(self) -> int:
        """Tokens in its cache while it decodes: not the newest."""
        return len(self.ids) - 1 - self.num_forgotten

    @property
    def has_answer(self) -> bool:
        """True once a token was generated."""
        return self._num_generated > 0

    @property
    def is_prefilled(self) -> bool:
        return self.num_prefilled == len(self.ids)

    def progress(self, began_s: float) -> Progress:
        """How far the prompt is, for any thread. `began_s`: when its request came."""
        num_tokens = len(self.request.prompt_ids)
        num_read = num_tokens if self.has_answer else self.num_prefilled
        return Progress(num_tokens, self.num_cached, num_read, time.monotonic() - began_s)

    def echo(self, tokens: Sequence[ChosenToken]) -> None:
        """Deliver the prompt's next tokens as the beginning of the answer."""
        text = ""
        for token in tokens:
            text += self._decode(token, is_listed=self.request.has_prompt_logprobs)
        self.num_echoed += len(tokens)
        self._show(text)

    def end_here(self) -> None:
        """Nothing more is to be generated."""
        self._finish("length")

    def add(self, logits_V: Tensor) -> bool:
        """Choose the next token and deliver its text. Returns True if it was the last token.

        The last output is not delivered here but by `end()`, after the caller has freed the
        sequence's seat and cache.
        """
        chosen = self._sampler.choose(logits_V)
        self.ids.append(chosen.token_id)
        self._num_generated += 1
        has_logprob = chosen.logprob is not None
        if chosen.token_id in self._end_ids:
            # Behind an echoed prompt clients count on one entry for each token generated.
            if has_logprob and self.request.echo:
                place = self._num_decoded
                self._tokens.append((TokenText(chosen, place), place))
            self._finish("stop")
            return True
        text = self._stops.add(self._decode(chosen, is_listed=has_logprob))
        if self._stops.stop is not None:
            self._show(text, finish="stop", is_cut=True)
            return True
        named = self._named_stops.get(chosen.token_id)
        if named is not None or self._stops.is_in(self._detokenizer.held):
            self._finish("stop", text, named)
            return True
        if self.request.constraint is not None and self.request.constraint.is_complete:
            self._finish("stop", text)
            return True
        if self._num_generated == self.request.max_new_tokens or self._is_too_late():
            self._finish("length", text)
            return True
        self._show(text)
        return False

    def _decode(self, token: ChosenToken, *, is_listed: bool) -> str:
        """Return the text that a token makes certain. `is_listed`: an output names the token."""
        start = self._num_decoded
        text = self._detokenizer.add(token.token_id)
        self._num_certain += len(text)
        whole = self._detokenizer.held.rstrip(UNFINISHED)
        self._num_decoded = self._num_certain + len(whole)
        if is_listed:
            self._tokens.append((TokenText(token, start), self._num_decoded))
        return text

    def _is_too_late(self) -> bool:
        """True if the checkpoint limits the time of an answer, and it is over."""
        return self._max_time is not None and time.monotonic() - self.began > self._max_time

    def end(self, error: BaseException | None = None) -> None:
        """Deliver the last output: an error, or what `add` kept back."""
        if error is not None:
            made = Output(num_generated=self._num_generated, num_cached=self.num_cached)
            self._deliver(replace(made, error=error))
        else:
            assert self._last is not None
            self._deliver(self._last)

    def _finish(self, reason: FinishReason, text: str = "", named: str | None = None) -> None:
        """Deliver what is left, up to a stop string. `named`: the one that the last token is."""
        text += self._stops.add(self._detokenizer.held)
        if self._stops.stop is None:
            text += self._stops.finish()
            self._stops.stop = named
        is_cut = self._stops.stop is not None
        self._show(text, finish="stop" if is_cut else reason, is_cut=is_cut)

    def _show(self, text: str, finish: FinishReason | None = None, *, is_cut: bool = False) -> None:
        """Deliver text and the tokens that end in it. The end delivers all tokens left.

        `is_cut`: a stop string cut the text, so tokens that reach beyond the cut are left out.
        """
        self._num_shown += len(text)
        tokens: list[TokenText] = []
        is_all = finish is not None and not is_cut
        while self._tokens:
            token, end = self._tokens[0]
            is_shown = token.offset < self._num_shown and end <= self._num_shown
            if not (is_all or is_shown):
                break
            self._tokens.popleft()
            tokens.append(token)
        counts = self._num_generated, self.num_cached
        output = Output(text, tuple(tokens), *counts, finish, self._stops.stop)
        if finish and self.embedding is not None:
            output = replace(output, embedding=self.embedding.unit())
        if finish:
            self._last = output
        elif text or tokens:
            self._deliver(output)
