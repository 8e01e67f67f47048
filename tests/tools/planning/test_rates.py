"""Rates are measured in bounded time, of memory that nobody has used before."""

from __future__ import annotations

import numpy as np
import pytest

from moe_infinity.tools.planning import rates
from moe_infinity.tools.planning.rates import PIECE_BYTES, SMALLEST_PAGE, new_memory_rate


@pytest.fixture
def asked(monkeypatch):
    """The memory that is measured: ordinary memory, so that what was written to it can be seen."""
    found = []

    def zeros(num_bytes):
        found.append(np.zeros(num_bytes, np.uint8))
        return found[-1].data

    monkeypatch.setattr(rates, "huge_pages", zeros)
    return found


def test_each_page_of_new_memory_is_used_once_by_some_thread(asked, monkeypatch):
    monkeypatch.setattr(rates, "NEW_BYTES", 5 * PIECE_BYTES)
    monkeypatch.setattr(rates, "NEW_S", 60.0)
    assert new_memory_rate(2) > 0
    (memory_N,) = asked
    assert len(memory_N) == 5 * PIECE_BYTES
    assert memory_N.sum() == 5 * PIECE_BYTES // SMALLEST_PAGE


def test_at_most_half_of_the_free_memory_is_used(asked, monkeypatch):
    monkeypatch.setattr(rates, "available_memory_bytes", lambda: 5 * PIECE_BYTES)
    new_memory_rate(2)
    assert [len(memory_N) for memory_N in asked] == [2 * PIECE_BYTES]


def test_where_nothing_is_free_one_piece_is_measured(asked, monkeypatch):
    monkeypatch.setattr(rates, "available_memory_bytes", lambda: 0)
    assert new_memory_rate(2) > 0


def test_measuring_ends_in_time_however_slowly_the_system_gives(asked, monkeypatch):
    monkeypatch.setattr(rates, "NEW_BYTES", 64 * PIECE_BYTES)
    monkeypatch.setattr(rates, "NEW_S", 0.0)
    assert new_memory_rate(3) > 0
    (memory_N,) = asked
    assert memory_N.sum() <= 3 * PIECE_BYTES // SMALLEST_PAGE  # one piece a thread
