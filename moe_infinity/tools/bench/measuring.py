"""The measurement: models with different budgets get the same token ids in turn.

    warm up -> repeat 1: 25 %, 50 % -> repeat 2: 50 %, 25 % -> ...

If not all fit into memory together, one runs after the other. Tests have the names that users of
llama-bench know:

    pp128          a prompt of 128 tokens, computed at once
    tg64 @ d128    64 tokens decoded one by one, after a prompt of 128
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import psutil
import torch
from torch import nn

from moe_infinity.architectures.model_parts import bytes_by_type, is_linear
from moe_infinity.cli.inspection import Summary
from moe_infinity.experts import DTYPE_BYTES, Phase, Step
from moe_infinity.kernels.kv_layers import new_cache
from moe_infinity.model import MoE

WARM_UP = -1  # the repeat that is not counted


class BenchTest(NamedTuple):
    """One line of the table."""

    num_prompt: int
    num_decoded: int  # 0: what is measured is the prompt

    @property
    def name(self) -> str:
        if self.num_decoded:
            return f"tg{self.num_decoded} @ d{self.num_prompt}"
        return f"pp{self.num_prompt}"

    @property
    def meaning(self) -> str:
        if self.num_decoded:
            return f"{self.num_decoded:,} tokens decoded one by one, after {self.num_prompt:,}"
        return f"a prompt of {self.num_prompt:,} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of each length; after the shortest one tokens are decoded. Their ids are given, so
    that every model computes the same ones.
    """

    lengths: tuple[int, ...]
    num_decoded: int
    repeats: int
    vocab_size: int
    text_ids: Sequence[int] = ()  # read in circles; empty: ids drawn at random

    @property
    def num_positions(self) -> int:
        """Tokens of the longest text."""
        return max(max(self.lengths), min(self.lengths) + self.num_decoded)

    def texts(self, repeat: int) -> Iterator[tuple[int, list[int]]]:
        """For each prompt its length, and the ids of it and of what is decoded after it."""
        for length in self.lengths:
            num_decoded = self.num_decoded if length == min(self.lengths) else 0
            yield length, self._ids(length + num_decoded, f"{repeat} {length}")

    def _ids(self, num_ids: int, seed: str) -> list[int]:
        """The same for the same seed, on every machine."""
        chance = random.Random(seed)
        if not self.text_ids:
            return [chance.randrange(self.vocab_size) for _ in range(num_ids)]
        start = chance.randrange(len(self.text_ids))
        return [self.text_ids[at % len(self.text_ids)] for at in range(start, start + num_ids)]


class Sample(NamedTuple):
    """One run of one test."""

    num_tokens: int
    seconds: float
    hits: int = 0
    lookups: int = 0  # of an expert, as a layer asks for it
    bytes_read: int = 0  # of experts that were not in memory
    disk_bytes: int = 0  # that the disk gave; the rest was in the page cache


class Needs(NamedTuple):
    """The bytes and operations that a token needs."""

    dense_bytes: int  # read for every token beside experts
    expert_bytes: float  # of one expert
    prompt_flops: float | None  # a token's products in a prompt; None: unknown


@dataclass(slots=True)
class Measured:
    """The samples of one model, and what it needs."""

    needs: Needs | None  # None: on a GPU, where nothing is known of what limits it
    about: str
    samples: dict[BenchTest, list[Sample]] = field(default_factory=dict)


class System(Protocol):
    """A model that is loaded."""

    needs: Needs | None
    about: str

    def run(self, ids: list[int], num_prompt: int) -> tuple[Sample, Sample]:
        """Return the samples of a prompt and of the tokens after it."""


Systems = Mapping[str, Callable[[], AbstractContextManager[System]]]
OnRun = Callable[[str, BenchTest], None]  # gets the name of the model that runs, and the test


def measure(
    systems: Systems, workload: Workload, *, together: bool, on_run: OnRun
) -> dict[str, Measured]:
    """Measurements by the names of the models. Raises what opening and running them raises."""
    groups = [systems] if together else [{name: system} for name, system in systems.items()]
    found: dict[str, Measured] = {}
    for group in groups:
        found |= _measure_group(group, workload, on_run)
    return found


def _measure_group(systems: Systems, workload: Workload, on_run: OnRun) -> dict[str, Measured]:
    with ExitStack() as stack:
        opened = {name: stack.enter_context(system()) for name, system in systems.items()}
        found = {name: Measured(system.needs, system.about) for name, system in opened.items()}
        for repeat in range(WARM_UP, workload.repeats):
            names = list(opened)
            first = max(repeat, 0) % len(names)
            for name in names[first:] + names[:first]:
                for test, sample in _run_texts(name, opened[name], workload, repeat, on_run):
                    if repeat != WARM_UP:
                        found[name].samples.setdefault(test, []).append(sample)
    return found


def _run_texts(
    name: str, system: System, workload: Workload, repeat: int, on_run: OnRun
) -> list[tuple[BenchTest, Sample]]:
    found = []
    for length, ids in workload.texts(repeat):
        on_run(name, BenchTest(length, 0))
        prompt, decoded = system.run(ids, length)
        found.append((BenchTest(length, 0), prompt))
        if decoded.num_tokens:
            found.append((BenchTest(length, decoded.num_tokens), decoded))
    return found


class Ours:
    """Feeds ids to a model, a prompt at once and the tokens after it one by one."""

    def __init__(self, moe: MoE, summary: Summary) -> None:
        self._moe = moe
        self.needs: Needs | None = None if moe.model.device.type != "cpu" else _needs(moe, summary)
        self.about = moe.report().experts

    def run(self, ids: list[int], num_prompt: int) -> tuple[Sample, Sample]:
        """Return the samples of the prompt and of the tokens after it."""
        self._cache = new_cache(self._moe.model.config, self._moe.config.kv_dtype)
        prompt = self._timed(Phase.PREFILL, [ids[:num_prompt]])
        return prompt, self._timed(Phase.DECODE, [[token_id] for token_id in ids[num_prompt:]])

    def _timed(self, phase: Phase, steps: list[list[int]]) -> Sample:
        before = self._counts(phase)
        started = time.perf_counter()
        for ids in steps:
            self._feed(phase, ids)
        seconds = time.perf_counter() - started
        counts = (now - then for now, then in zip(self._counts(phase), before, strict=True))
        return Sample(sum(map(len, steps)), seconds, *counts)

    def _feed(self, phase: Phase, ids: list[int]) -> None:
        step = Step(
            phase=phase,
            num_sequences=1,
            tokens_per_sequence=len(ids),
            begins_B=np.array([phase is Phase.PREFILL]),
            token_ids_T=np.array(ids),
        )
        out = self._moe.forward(
            step,
            input_ids=torch.tensor([ids], dtype=torch.int64, device="cpu"),
            cache=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        out.logits[0, -1].argmax().item()  # waits for a GPU

    def _counts(self, phase: Phase) -> tuple[int, int, int, int]:
        counters = self._moe.engine.bookkeeping.counters.of(phase)
        return counters.hits, counters.lookups, counters.bytes_read, disk_bytes_read()


def disk_bytes_read() -> int:
    """Bytes that this process has read from disks so far; 0 where the system does not say."""
    try:
        return int(psutil.Process().io_counters().read_bytes)
    except (AttributeError, OSError, psutil.Error):  # macOS has no such counters
        return 0


def _needs(moe: MoE, summary: Summary) -> Needs:
    """Return what a token of this model needs, dense weights as they are in memory."""
    decoder = moe.model.get_decoder()
    head = moe.model.get_output_embeddings()
    # A token needs one row of the input embedding. It is the weight of the head in some models.
    dense_bytes = _num_bytes(decoder) - _num_bytes(moe.model.get_input_embeddings())
    tier = moe.report().tiers[0]
    num_experts = moe.engine.bookkeeping.total_experts
    # A slot is as large as the largest expert; loading may pack what the checkpoint has.
    expert_bytes = min(tier.capacity_bytes / tier.capacity, summary.expert_bytes / num_experts)
    return Needs(dense_bytes + _num_bytes(head), expert_bytes, _prompt_flops(decoder, moe, summary))


def _num_bytes(module: nn.Module) -> int:
    return sum(bytes_by_type(module).values())


def _prompt_flops(decoder: nn.Module, moe: MoE, summary: Summary) -> float | None:
    """At least: attention over the context, norms and logits of one token are left out."""
    if summary.top_k is None:
        return None
    dense = sum(m.in_features * m.out_features for m in decoder.modules() if is_linear(m))
    dtype = str(moe.model.dtype).removeprefix("torch.")
    expert = summary.unpacked_bytes_per_expert / DTYPE_BYTES[dtype]
    return 2.0 * (dense + summary.moe_layers * summary.top_k * expert)


@contextmanager
def opened_ours(
    opened: Callable[[], AbstractContextManager[MoE]], summary: Summary
) -> Iterator[Ours]:
    """With its memory for experts filled first, if it preloads at all: what is read in the
    background would be measured too.
    """
    with opened() as moe:
        if moe.config.preload != "off":
            moe.preload()
        yield Ours(moe, summary)
