"""Text while it is generated. Generation runs in a thread, and the caller iterates the pieces.

Either may stop first.
"""

from __future__ import annotations

import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from moe_infinity.detokenizer import Detokenizer
from moe_infinity.errors import Cancelled, ConfigError, MoEInfinityError

POLL_S = 0.5  # between a waiting reader's checks that the generating thread is alive
STOP_TIMEOUT_S = 120.0  # generation stops at the next token, which a slow disk may delay


class TextStream:
    """Pieces of generated text; iterate once. Token ids and times are complete afterwards.

    Leaving the loop early stops generation at the next token, or at the prompt's next MoE layer.
    An error of generation is raised in the loop. Raises MoEInfinityError for a second iteration.
    """

    def __init__(
        self, generate: Callable[..., Any], tokenizer: Any, arguments: dict[str, Any]
    ) -> None:
        """`generate(cancelled, **arguments)` may raise Cancelled once that event is set."""
        self.text = ""
        self._pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None is the end
        self._streamer = _Pieces(Detokenizer(tokenizer), self._pieces)
        self._cancelled = threading.Event()
        self._error: BaseException | None = None
        stopping: Any = StoppingCriteriaList(arguments.pop("stopping_criteria", None) or [])
        stopping.append(_StopWhen(self._cancelled))
        arguments = arguments | {"streamer": self._streamer, "stopping_criteria": stopping}
        self._generate = partial(generate, self._cancelled, **arguments)
        self._thread = threading.Thread(target=self._run, name="moe-infinity-generate", daemon=True)

    @property
    def token_ids(self) -> list[int]:
        """Ids of the generated tokens so far."""
        return self._streamer.token_ids

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the start of the iteration to the first token; None before it."""
        times = self._streamer.times
        return times[1] - times[0] if len(times) > 1 else None

    @property
    def tpot_s(self) -> float | None:
        """Median seconds per token after the first; None if there are not two tokens."""
        times = self._streamer.times[1:]
        gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
        return statistics.median(gaps) if gaps else None

    def __iter__(self) -> Iterator[str]:
        if self._thread.ident is not None:
            raise MoEInfinityError("a stream can be iterated once; call stream() again")
        try:
            self._thread.start()
            while True:
                try:
                    piece = self._pieces.get(timeout=POLL_S)
                except queue.Empty:
                    if self._thread.is_alive():
                        continue
                    break
                if piece is None:
                    break
                self.text += piece
                yield piece
        finally:
            self._cancelled.set()
            with suppress(RuntimeError):  # Ctrl-C came before it could start
                self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            raise MoEInfinityError(f"generation did not stop within {STOP_TIMEOUT_S:.0f} s")
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        self._streamer.begin()
        try:
            self._generate()
        except Cancelled:
            pass  # the reader has left
        except BaseException as error:
            self._error = error
        finally:
            self._pieces.put(None)


def unstreamed(config: Any) -> list[str]:
    """Names of the settings of a GenerationConfig that do not choose one token after another."""
    is_asked = {
        "num_beams": (config.num_beams or 1) > 1,
        "constraints": config.constraints is not None,
        "force_words_ids": config.force_words_ids is not None,
        "penalty_alpha": bool(config.penalty_alpha) and config.do_sample is not True,
        "dola_layers": config.dola_layers is not None,
    }
    return [name for name, asked in is_asked.items() if asked]


def has_own_generate(model: Any) -> bool:
    """Return True if a model, or the code of its checkpoint, does not generate by transformers'
    common method.
    """
    return type(model).generate is not GenerationMixin.generate or "generate" in vars(model)


def merged_settings(model: Any, arguments: Mapping[str, Any]) -> Any:
    """The settings of a generate() with these arguments: they, its generation_config, or the
    model's say them.
    """
    given = arguments.get("generation_config")
    config = copy(model.generation_config)
    vars(config).update(vars(GenerationConfig()) | vars(config))  # a class of its own has not all
    asked = vars(given) if isinstance(given, GenerationConfig) else {}
    for name, value in {**asked, **arguments}.items():
        if value is not None and hasattr(config, name):
            setattr(config, name, value)
    return config


def streamed_arguments(model: Any, tokenizer: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of generate() with which it streams one sequence, as these and the model's
    generation_config say. Raises ConfigError that names a setting with which it cannot.
    """
    config = merged_settings(model, arguments)
    several = ["num_return_sequences"] if (config.num_return_sequences or 1) > 1 else []
    for name in [*unstreamed(config), *several]:
        raise ConfigError(
            f"{name} ({getattr(config, name)}) has no stream: that takes one token at a time\n"
            "hint: take it out of generation_config.json, or use generate()"
        )
    needs_tokenizer = config.stop_strings is not None or config.token_healing
    return {**arguments, **({"tokenizer": tokenizer} if needs_tokenizer else {})}


def check_one_sequence(inputs: Any) -> None:
    """Raise ConfigError unless these are tensors of one sequence that is not empty."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise ConfigError("stream() takes text, or tokenizer(text, return_tensors='pt')")
    num_sequences, num_tokens = ids.shape
    if num_sequences != 1:
        raise ConfigError(f"stream() takes one sequence, got {num_sequences}; use generate()")
    if num_tokens == 0:
        raise ConfigError("the prompt is empty: there is nothing to continue")


class _Pieces(BaseStreamer):  # type: ignore[misc]
    """Makes text of the tokens that generate() gives it, and keeps their ids and times. times[0] is
    the start.
    """

    def __init__(self, detokenizer: Detokenizer, pieces: queue.SimpleQueue[str | None]) -> None:
        self.token_ids: list[int] = []
        self.times: list[float] = []
        self._detokenizer = detokenizer
        self._pieces = pieces
        self._saw_prompt = False

    def begin(self) -> None:
        self.times.append(time.perf_counter())

    def put(self, value: Tensor) -> None:
        if self._saw_prompt:
            new_ids = value.flatten().tolist()
            self.token_ids += new_ids
            self.times.append(time.perf_counter())
            self._show("".join(map(self._detokenizer.add, new_ids)))
        self._saw_prompt = True

    def end(self) -> None:
        self._show(self._detokenizer.held)

    def _show(self, text: str) -> None:
        if text:
            self._pieces.put(text)


class _StopWhen(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        shape = (input_ids.shape[0],)
        device = input_ids.device
        return torch.full(shape, self._event.is_set(), dtype=torch.bool, device=device)
