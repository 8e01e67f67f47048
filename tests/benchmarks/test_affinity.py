"""Predicted activation matrices find the replica that served the like."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.replicas import affinity
from benchmarks.replicas.affinity import RequestForecast, Served, choose, similarity
from moe_infinity.tools.pictures.figures import matrix_of

LAYERS, EXPERTS = 2, 6


def of_task(task: int, num_tokens: int = 12) -> np.ndarray:
    """[T, L, K]: experts 0 to 2 or 3 to 5."""
    rng = np.random.default_rng(task)
    cells = rng.random((num_tokens, LAYERS, 3)).argsort(axis=2)[:, :, :2]
    return cells + 3 * task


def test_tokens_tell_the_task():
    forecast = RequestForecast(LAYERS, EXPERTS)
    served = [Served(LAYERS, EXPERTS) for _ in range(2)]
    for task in (0, 1):
        eam_LE = matrix_of(of_task(task), (LAYERS, EXPERTS))
        forecast.learn([*range(100 * task, 100 * task + 12), 7], eam_LE)
        served[task].add(eam_LE)
    for task in (0, 1):
        wanted_LE = forecast.predict([7, 100 * task + 3, 100 * task + 8])
        alike = [similarity(wanted_LE, each.beyond(forecast.base_LE)) for each in served]
        assert alike[task] > 0.3 > 0 > alike[1 - task]


def test_what_nobody_knows_is_like_nothing():
    forecast = RequestForecast(LAYERS, EXPERTS)
    served = Served(LAYERS, EXPERTS)
    assert similarity(forecast.predict([1, 2]), served.beyond(forecast.base_LE)) == 0


@pytest.mark.parametrize(
    ("loads", "similarities", "expected"),
    [
        ([0, 0, 0], [0.1, 0.9, 0.2], 1),
        ([2, 2, 1], [0.9, 0.85, 0.1], 0),
        ([2, 1, 1], [0.9, 0.85, 0.1], 1),  # as good, and has less to do
        ([3, 1, 1], [0.9, 0.1, 0.2], 2),  # the best one has too much to do
        ([4, 4, 4], [0.0, 0.0, 0.0], 0),
    ],
)
def test_the_least_loaded_of_those_that_are_about_as_similar(loads, similarities, expected):
    assert choose(loads, similarities) == expected


def test_tokens_that_were_not_used_for_long_are_forgotten(monkeypatch):
    monkeypatch.setattr(affinity, "TABLE_BYTES", 3 * LAYERS * EXPERTS * 4)
    forecast = RequestForecast(LAYERS, EXPERTS)
    for token_id in (1, 2, 3, 1, 4):
        forecast.learn([token_id], matrix_of(of_task(token_id % 2), (LAYERS, EXPERTS)))
    known = {token_id for token_id in range(6) if forecast.predict([token_id]).any()}
    assert known == {1, 3, 4}
