"""What a router chose, counted once for everybody."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_infinity.experts import NO_EXPERT, Routing, without_gaps


def routing_of(*experts_TK: list[int]) -> Routing:
    index_TK = torch.tensor(experts_TK)
    return Routing.of(index_TK, torch.ones(index_TK.shape))


@pytest.mark.parametrize(
    ("experts_TK", "activated", "counts", "num_without"),
    [
        ([[3, 1]], [1, 3], 1, 0),
        ([[NO_EXPERT, 2]], [2], 1, 1),
        ([[4, 4]], [4], [2], 0),
        ([[NO_EXPERT, NO_EXPERT]], [], 1, 2),
        ([[0, 1], [1, 2]], [0, 1, 2], [1, 2, 1], 0),
        ([[5, NO_EXPERT], [5, 0]], [0, 5], [1, 2], 1),
    ],
)
def test_activated_experts_are_ascending_and_counted_without_gaps(
    experts_TK, activated, counts, num_without
):
    routing = routing_of(*experts_TK)
    assert routing.num_tokens == len(experts_TK)
    assert routing.activated == activated
    shape = len(activated)
    assert np.array_equal(np.broadcast_to(routing.counts, shape), np.broadcast_to(counts, shape))
    assert routing.num_without == num_without


def test_a_gap_is_filled_with_another_expert_of_the_token_or_zero():
    experts_TK = np.array([[4, NO_EXPERT], [NO_EXPERT, NO_EXPERT], [1, 2]])
    assert without_gaps(experts_TK).tolist() == [[4, 4], [0, 0], [1, 2]]
