"""Host and device against a few dicts, whatever the host does between two steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.experts import ExpertKey
from moe_infinity.gpu.device_table import ABSENT
from moe_infinity.gpu.kernels import reference
from tests.cuda_notes import note_cuda
from tests.gpu.device_tables import World, random_scores, routings, step

pytest.importorskip("triton", reason="needs triton")
from moe_infinity.gpu.kernels import resolve as triton_resolve

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.triton


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs them one after the other."""
    monkeypatch.setattr(triton_resolve, "FILL_PROGRAMS", 2)
    monkeypatch.setattr(triton_resolve, "FILL_BYTES", 16)


def test_a_gpu_is_asked_for_an_event_and_for_a_stream_of_scores(monkeypatch):
    notes, world = note_cuda(monkeypatch), World("cpu")
    world.table._step_end, world.table._upload_stream = (
        torch.cuda.Event(),
        torch.cuda.Stream("cuda"),
    )
    world.table.end_step()
    assert notes.asked == ["kernels records event 1"]
    notes.is_over = False
    assert not world.table.is_over()
    scores = random_scores(world, 0)[1:2]
    world.table.upload_scores(scores, first_layer=1)
    world.table.wait()
    assert notes.asked[1:] == ["on copies", "the CPU waits for event 1"]
    assert (world.table.scores_LHE[1].numpy() == scores).all()
    notes.is_over = True
    assert world.table.is_over()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_host_and_gpu_read_each_other_while_kernels_wait():
    """A second of waiting before and after the layer in whose words and scores they meet."""
    world = World("cuda", slots=2)
    world.upload({ExpertKey(2, 5): 0, ExpertKey(2, 6): 1})
    index_TK = world.index([[3]])
    triton_resolve.resolve(World("cuda", slots=2).table, 0, index_TK)  # compiles
    world.table.upload_scores(
        np.zeros((1, 2, 8)), first_layer=2
    )  # what is used first may wait for kernels
    world.table.end_step()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_500_000_000)
    triton_resolve.resolve(world.table, 0, index_TK)
    torch.cuda._sleep(1_500_000_000)
    world.table.end_step()
    scores = np.zeros((1, 2, 8))
    scores[:, :, 5] = 1
    world.table.upload_scores(scores, first_layer=2)  # before, expert 5 would leave
    report = None
    while report is None and not world.table.is_over():
        report = world.table.read_report(0, 1)
    assert report is not None
    assert not world.table.is_over()
    assert report.misses == {ExpertKey(0, 3): 1}


class Model:
    """What device and host do, in dicts."""

    def __init__(self, world: World) -> None:
        self.last_layers = world.table.last_layers
        self.scores = np.zeros(world.table.scores_LHE.shape)
        self.slots: list[ExpertKey | None] = [None] * len(world.slots)
        self.misses: list[tuple[ExpertKey, int]] = []

    def resident(self) -> dict[ExpertKey, int]:
        return {key: slot for slot, key in enumerate(self.slots) if key is not None}

    def step(self, routing) -> list[list[object]]:
        found = []
        for layer, index_TK in enumerate(routing):
            used = [ExpertKey(layer, expert) for index_K in index_TK for expert in index_K]
            places = {key: self.place(key, used) for key in sorted({*used}) if key.expert_idx >= 0}
            found.append([places.get(key) for key in used])
        return found

    def place(self, key: ExpertKey, used: list[ExpertKey]) -> object:
        if key in self.slots:
            return self.slots.index(key)
        slot = self.taken(key, used)
        self.misses.append((key, slot))
        if slot == ABSENT:
            return key
        self.slots[slot] = key
        return slot

    def taken(self, key: ExpertKey, used: list[ExpertKey]) -> int:
        if None in self.slots:
            return self.slots.index(None)
        part = next(
            p for p, last_row in enumerate(self.last_layers) if key.moe_layer_idx <= last_row
        )
        stay = range(key.moe_layer_idx + 1, self.last_layers[part] + 1)
        leaving = [k for k in self.slots if k and k.moe_layer_idx not in stay and k not in used]
        scores = self.scores[:, part]
        lowest = min((scores[k] for k in leaving), default=None)
        return next((self.slots.index(k) for k in leaving if scores[k] == lowest), ABSENT)


def act_as_host(data, world: World, model: Model) -> None:
    """Anything it may do between two steps."""
    if data.draw(st.booleans()):
        model.scores = random_scores(world, data.draw(st.integers(0, 99)))
        world.upload_all_scores(model.scores)
    if data.draw(st.integers(0, 3)) == 0:
        order = data.draw(st.permutations(world.keys))
        resident = dict(zip(order, data.draw(st.sets(st.sampled_from(range(7)))), strict=False))
        for key, slot in resident.items():
            world.slots[slot].copy_(world.bytes_of(key))
        world.upload(resident)
        model.slots = [None] * len(model.slots)
        for key, slot in resident.items():
            model.slots[slot] = key


@pytest.mark.parametrize(
    "kernels",
    [pytest.param(reference, id="reference"), pytest.param(triton_resolve, id="triton")],
)
@settings(max_examples=8)
@given(data=st.data())
def test_host_and_device_agree_whatever_the_host_decides(kernels, data):
    world = World(DEVICE if kernels is triton_resolve else "cpu", slots=7)
    model = Model(world)
    for _ in range(data.draw(st.integers(1, 6))):
        act_as_host(data, world, model)
        world.table.check_invariants()
        routing = data.draw(routings(max_tokens=3, max_k=4))
        assert step(kernels, world, routing) == model.step(routing)
        num_pairs = len(routing[0]) * len(routing[0][0])
        reports = [world.report(layer, num_pairs) for layer in range(3)]
        world.reports(num_pairs)
        assert [miss for report in reports for miss in report.misses.items()] == model.misses
        assert world.table.resident_slots() == model.resident()
        for key, slot in model.resident().items():
            assert torch.equal(world.slots[slot].cpu(), world.bytes_of(key))
        model.misses = []
