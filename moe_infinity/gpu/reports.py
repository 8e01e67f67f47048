"""How the host learns what the device decides in a step, layer by layer, while the step runs.

The host polls the device's reports. It enters the report of an MoE layer in the residency table,
counts the layer in the bookkeeping, and uploads new scores of the layer's experts. The device never
waits for this. If it waits for its link, the host keeps up with it, and the device evicts by what
the layers before were routed to. If it is faster, the host applies the rest of the reports while
the next step runs.

Private names of cache/residency.py used here: `_entries`, `_free`, `_layer_of_slot`,
`_expert_of_slot`, `_transient`, `_evict`. No other engine enters what somebody else has decided.
"""

from __future__ import annotations

import time
from collections.abc import Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moe_infinity.cache.activation_aware import ActivationAware
from moe_infinity.cache.policies import EvictionPolicy, Scores
from moe_infinity.cache.residency import Entry, ResidencyTable
from moe_infinity.engine.bookkeeping import Bookkeeping
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.experts import ExpertKey, Ints, Residency, Routing, Step
from moe_infinity.gpu.device_table import DeviceTable, LayerReport

POLL_TIMEOUT_S = 10.0  # then the remaining reports are applied later
POLL_INTERVAL_S = 20e-6  # a fraction of the time that an MoE layer with a miss takes


class PolledStep(NamedTuple):
    """A step that the device decides, as far as the host has read and applied its reports."""

    step: Step
    has_begun: bool = False  # in the bookkeeping
    is_read: bool = False  # all its reports were read
    # MoE layers and their reports, read and not yet applied, in order.
    reports: tuple[tuple[int, LayerReport], ...] = ()
    last_read: int = -1  # MoE layer

    def without_first(self) -> PolledStep:
        """Its first report is being applied."""
        return self._replace(reports=self.reports[1:])


class ReportPoller:
    """Polls the reports of one device. Used by the thread that runs the steps.

    For each step: finish_step() of the step before, begin_step(); begin_run(), note_launch() of
    every MoE layer, poll_reports().
    """

    def __init__(self, bookkeeping: Bookkeeping, table: DeviceTable) -> None:
        self._bookkeeping = bookkeeping
        self._table = table
        self._residency = bookkeeping.tiers[0].table
        # (T, K) of each MoE layer, as it was launched last.
        self.shapes: dict[int, tuple[int, int]] = {}
        self._launched: set[int] = set()  # MoE layers, in this run of the step
        self._current: PolledStep | None = None  # has begun, and may be running
        self._previous: PolledStep | None = None  # has reports that were not applied

    def finish_step(self) -> None:
        """Make the current step the previous one: the caller has its token."""
        if self._current is not None:
            self._previous = self._current
            self._current = None

    def begin_step(self, step: Step) -> None:
        """Begin a step. Reads all reports of the previous one, which it will overwrite."""
        if self._previous is not None:
            self._read_previous()
        self._current = PolledStep(step)

    @property
    def current(self) -> PolledStep:
        """The step that has begun last. Only from begin_step() to finish_step()."""
        assert self._current is not None
        return self._current

    def begin_run(self) -> None:
        """Begin to launch the current step."""
        self._launched.clear()

    def note_launch(self, moe_layer_idx: int, shape: tuple[int, int], *, is_captured: bool) -> None:
        """Expect a report of this layer, of `shape` (T, K); `is_captured`: not in this run.

        Raises UnsupportedModelError if the layer was already launched in this run.
        """
        self.shapes[moe_layer_idx] = shape
        if is_captured:
            return
        if moe_layer_idx in self._launched:
            raise UnsupportedModelError(
                f"MoE layer {moe_layer_idx} ran twice in one step, which a GPU cannot report\n"
                "hint: use gpu_engine='host'"
            )
        self._launched.add(moe_layer_idx)
        if self._current is not None and self._may_evict:
            self._apply_next()

    def catch_up(self) -> None:
        """Apply the rest of the previous step and begin the current one in the bookkeeping, if this
        was not done yet.
        """
        current = self.current
        if not current.has_begun:
            self.apply_rest()
            self._bookkeeping.note_begin(current.step)
            self._current = current._replace(has_begun=True)
            self.upload_scores()

    def poll_reports(self) -> None:
        """Apply reports until the device has come to the last MoE layer, or for POLL_TIMEOUT_S.

        All of the step was launched. The device is still busy with the last layer when this
        returns, so it does not have to wait for what the caller launches next.
        """
        self.catch_up()
        last_layer = max(self.shapes, default=-1) if self._may_evict else -1
        until = time.monotonic() + POLL_TIMEOUT_S
        while self.current.last_read < last_layer and not self._table.is_over():
            if not self._apply_next():
                time.sleep(POLL_INTERVAL_S)
            if time.monotonic() > until:
                break

    def apply_rest(self, *, is_residency_known: bool = True) -> None:
        """Apply the remaining reports of the previous step. Waits for the step.

        `is_residency_known=False`: only count them, as slots were emptied meanwhile.
        """
        if self._previous is not None:
            self._read_previous()
            while self._previous.reports:
                moe_layer_idx, report = self._previous.reports[0]
                if is_residency_known:
                    self._enter(report)
                self._previous = self._previous.without_first()  # an interruption counts it once
                self._count(moe_layer_idx, report)
            self._previous = None

    def drop_steps(self) -> None:
        """Forget the current step and the previous one."""
        self._current = None
        self._previous = None

    def _enter(self, report: LayerReport) -> None:
        """The loads of one layer, in the residency table."""
        for key, slot_id in report.misses.items():
            if slot_id >= 0:
                apply_load(self._residency, key, slot_id)

    def _count(self, moe_layer_idx: int, report: LayerReport) -> None:
        """One layer, in the bookkeeping."""
        index_TK = report.expert_P.reshape(-1, self.shapes[moe_layer_idx][1])
        note_layer(self._bookkeeping, moe_layer_idx, index_TK, report.misses.keys())

    def upload_scores(self, moe_layer_idx: int | None = None) -> None:
        """Score the experts of one MoE layer anew, or all, and upload that. Nothing is uploaded if
        every expert has a slot.
        """
        if not self._may_evict:
            return
        first_layer = moe_layer_idx or 0
        stop = None if moe_layer_idx is None else moe_layer_idx + 1
        tier = self._bookkeeping.tiers[0]
        scores = [
            leaving_scores(tier.table, tier.policy, last_layer)[first_layer:stop]
            for last_layer in self._table.last_layers
        ]
        self._table.upload_scores(np.stack(scores, axis=1), first_layer)

    @property
    def _may_evict(self) -> bool:
        return self._residency.num_slots < self._bookkeeping.total_experts

    def _read_new(self, polled: PolledStep, *, is_over: bool) -> PolledStep:
        """The step with what the device has reported by now. `is_over`: nothing more will be
        reported, so a layer without a report did not run.
        """
        reports = list(polled.reports)
        last_read = polled.last_read
        for moe_layer_idx, (num_tokens, top_k) in sorted(self.shapes.items()):
            if moe_layer_idx > last_read:
                report = self._table.read_report(moe_layer_idx, num_tokens * top_k)
                if report is not None:
                    reports.append((moe_layer_idx, report))
                    last_read = moe_layer_idx
                elif not is_over:
                    break
        return polled._replace(reports=tuple(reports), last_read=last_read)

    def _read_previous(self) -> None:
        """Read all reports of the previous step, and clear them for the next one.

        Waits for the step; not if the caller has read its token, as the device is done with it.
        """
        assert self._previous is not None
        if not self._previous.is_read:
            self._table.wait()
            self._previous = self._read_new(self._previous, is_over=True)._replace(is_read=True)
            self._table.begin_step()

    def _apply_next(self) -> bool:
        """Apply the next report, if there is one, and upload new scores of its layer's experts."""
        self.catch_up()
        self._current = self._read_new(self.current, is_over=False)
        if not self._current.reports:
            return False
        moe_layer_idx, report = self._current.reports[0]
        self._enter(report)
        self._current = self._current.without_first()  # an interruption counts it once
        self._count(moe_layer_idx, report)
        self.upload_scores(moe_layer_idx)
        return True


# What the bookkeeping learns of a device that decides


def apply_load(table: ResidencyTable, key: ExpertKey, slot_id: int) -> None:
    """Enter a load that the device made in a decode step: `key` is RESIDENT in this slot, and the
    expert that had the slot is evicted.
    """
    assert table.lookup(key) is None, key
    if table._layer_of_slot[slot_id] >= 0:
        table._evict([slot_id])
    table._free.remove(slot_id)
    table._entries[key] = Entry(slot_id, Residency.RESIDENT)
    table._layer_of_slot[slot_id], table._expert_of_slot[slot_id] = key


def evict_all(table: ResidencyTable) -> None:
    """Evict every expert, as what is in the slots is unknown. None is held or loading."""
    table._evict(table.slots_of(table.resident_keys()))


def leaving_scores(
    table: ResidencyTable, policy: EvictionPolicy, moe_layer_idx: int
) -> NDArray[np.float64]:
    """Return [layers, experts]: after this layer has run, the resident with the lowest score leaves
    first. Transient experts are below all others, as the table has it.
    """
    scores = scores_after(policy, moe_layer_idx).astype(np.float64)
    transient = table._layer_of_slot[table._transient], table._expert_of_slot[table._transient]
    scores[transient] -= scores.max() - scores.min() + 1
    return scores


def scores_after(policy: EvictionPolicy, moe_layer_idx: int) -> Scores:
    """Return the scores after this layer has run, whatever it activates. A device needs them before
    the host knows the routing.
    """
    if isinstance(policy, ActivationAware):
        return policy.scores_after(moe_layer_idx)
    return policy.scores()


def note_layer(
    bookkeeping: Bookkeeping, moe_layer_idx: int, index_TK: Ints, missed: Set[ExpertKey]
) -> None:
    """Record a layer of the decode step that began last, as the device has decided it. If the layer
    had fewer tokens than the step, it is not known which ones, and recorder and predictor skip the
    layer.
    """
    routing = Routing.of_experts(index_TK, None)
    if routing.num_tokens != bookkeeping.recorder.step.num_tokens:
        routing = routing._replace(top_k_index_TK=None)
    bookkeeping.note_routing(moe_layer_idx, routing)
    keys = [bookkeeping.keys[moe_layer_idx][expert_idx] for expert_idx in routing.activated]
    copied = [key for key in keys if key in missed]
    bookkeeping.counters.decode.add_lookups(len(keys) - len(copied), 0, len(copied))
    device, host = bookkeeping.tiers
    device.table.note_use(keys)
    host.table.note_use(copied)
