"""Small traces for the tests of the simulator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from moe_infinity.predict.tracefile import SequenceTrace


def sequence(
    experts: object, *, num_prompt: int = 0, first_step: int = 0, token_ids: Sequence[int] = ()
) -> SequenceTrace:
    """Experts [T, L, K]; the prompt is one step, each token after it one more."""
    experts_TLK = np.array(experts, dtype=np.int64)
    num_tokens = len(experts_TLK)
    steps_T = first_step + np.maximum(np.arange(num_tokens) - max(num_prompt - 1, 0), 0)
    ids_T = np.array(token_ids) if len(token_ids) else np.full(num_tokens, -1)
    return SequenceTrace(experts_TLK, ids_T, np.arange(num_tokens) < num_prompt, steps_T)


def one_after_the_other(lengths: Sequence[tuple[int, int]], **shape: int) -> list[SequenceTrace]:
    """Sequences of (prompt, decoded) tokens with random experts; every token has an id of its own
    and, in its first layer, its own experts.
    """
    return list(_sequences(lengths, **shape))


def _sequences(
    lengths: Sequence[tuple[int, int]],
    *,
    num_layers: int = 3,
    num_experts: int = 6,
    top_k: int = 2,
    seed: int = 0,
):
    rng = np.random.default_rng(seed)
    step = first_id = 0
    for num_prompt, num_decoded in lengths:
        num = num_prompt + num_decoded
        cells = rng.random((num, num_layers, num_experts)).argsort(axis=2)[:, :, :top_k]
        ids = range(first_id, first_id + num)
        result = sequence(cells, num_prompt=num_prompt, first_step=step, token_ids=ids)
        yield result
        first_id += num
        step += len(np.unique(result.steps_T))


def lengths(*, max_prompt: int = 4, max_decoded: int = 5, max_requests: int = 6):
    """Hypothesis: (prompt, decoded) tokens of some requests, at least one token each."""
    one = st.tuples(st.integers(0, max_prompt), st.integers(0, max_decoded)).filter(any)
    return st.lists(one, min_size=1, max_size=max_requests)
