"""Lets the planner's loads begin while a layer computes, and measures the time it plans with."""

from __future__ import annotations

import time

from moe_infinity.cache.counters import Counters
from moe_infinity.cache.policies import EvictionPolicy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.experts import ExpertKey
from moe_infinity.memory.mover import Mover
from moe_infinity.prefetch.planner import Planner

ROW_TIME_RATE = 0.1  # of the moving average of the time between two rows
LONGEST_ROW_S = 1.0  # longer is a pause between requests, not a row


class Prefetcher:
    """Raises ConfigError for a policy that predicts nothing."""

    def __init__(self, table: ResidencyTable, policy: EvictionPolicy, mover: Mover) -> None:
        self._table = table
        self._planner = Planner(table, policy)
        self._mover = mover
        self._row_s = 0.0  # from one row's routing to the next one's, waiting left out: lately
        self._last_row = (0.0, 0.0)  # when it began, and all waiting until then
        self._queued_s = 0.0

    def begin_row(self, counters: Counters) -> None:
        """A row was routed: before its experts are looked up, note what arrived."""
        self._queued_s = self._mover.settle()
        now, stall_s = time.perf_counter(), counters.prefill.stall_s + counters.decode.stall_s
        row_s = now - self._last_row[0] - (stall_s - self._last_row[1])
        self._last_row = now, stall_s
        if row_s < LONGEST_ROW_S:
            self._row_s += (row_s - self._row_s) * (ROW_TIME_RATE if self._row_s else 1)

    def begin_loads(self, moe_row: int) -> list[ExpertKey]:
        """Begin what is worth it while this row, whose experts are held, computes."""
        if not self._row_s:
            return []
        keys = self._planner.plan(
            moe_row,
            load_s=self._mover.load_s or self._row_s,
            row_s=self._row_s,
            queued_s=self._queued_s,
        )
        self._mover.load_ahead({key: self._table.begin_prefetch(key) for key in keys})
        return keys
