"""A model of ours under measurement: the same ids a step as any other system gets."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from moe_infinity.architectures.packed_linear import bytes_by_type, is_linear
from moe_infinity.experts import DTYPE_BYTES, Phase, Step
from moe_infinity.inspection import Summary
from moe_infinity.model import MoE
from moe_infinity.system.machine import disk_bytes_read
from moe_infinity.tools.bench.rows import Needs, Sample


class Ours:
    """Feeds ids to a model, a prompt at once and the tokens after it one by one."""

    def __init__(self, moe: MoE, summary: Summary) -> None:
        self._moe = moe
        self.needs: Needs | None = None if moe.model.device.type != "cpu" else _needs(moe, summary)
        self.about = moe.report().experts

    def run(self, ids: list[int], num_prompt: int) -> tuple[Sample, Sample]:
        """Of the prompt, and of the tokens after it."""
        self._cache = DynamicCache(config=self._moe.model.config)
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


def _needs(moe: MoE, summary: Summary) -> Needs:
    """What a token takes of this model, dense weights as they are in memory."""
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
def opened_ours(opened: AbstractContextManager[MoE], summary: Summary) -> Iterator[Ours]:
    """With its memory for experts filled first, if it preloads at all: what is read in the
    background would be measured too.
    """
    with opened as moe:
        if moe.config.preload != "off":
            moe.preload()
        yield Ours(moe, summary)
