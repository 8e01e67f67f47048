"""The device's own part of the cache: resolve and fill against their twins, state for state, and
the protocol of host and device against a few dicts.

Without a GPU the kernels run in Triton's interpreter; with one, compiled, and in a CUDA graph.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.experts import ExpertKey
from moe_infinity.kernels import slot_reference
from moe_infinity.kernels.device_table import ABSENT, BARRED, ON_DISK, Miss
from tests.numerics.device_tables import World

pytest.importorskip("triton", reason="needs triton")
from moe_infinity.kernels import triton_resolve

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [pytest.param(slot_reference, id="twin"), pytest.param(triton_resolve, id="triton")]
pytestmark = pytest.mark.triton
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs them one after the other."""
    monkeypatch.setattr(triton_resolve, "FILL_PROGRAMS", 2)
    monkeypatch.setattr(triton_resolve, "FILL_BYTES", 16)


def world_for(kernels, **sizes) -> World:
    return World(DEVICE if kernels is triton_resolve else "cpu", **sizes)


def step(kernels, world: World, routing) -> list[list[object]]:
    """Where the pairs of each row are."""
    found = []
    for row, index_TK in enumerate(routing):
        pointers_TK = kernels.resolve(world.table, row, world.index(index_TK))
        assert pointers_TK.shape == (len(index_TK), len(index_TK[0]))
        found.append(world.places(pointers_TK))
        kernels.fill(world.table, pointers_TK)
    return found


def report_of(world: World):
    world.table.begin_read()
    report = world.table.finish_read()
    world.table.check_invariants()
    return report


@pytest.mark.parametrize("kernels", KINDS)
def test_an_expert_that_several_tokens_miss_takes_one_slot(kernels):
    world = world_for(kernels)
    world.table.free([0, 1, 2])
    (found,) = step(kernels, world, [[[5, 3], [3, 5], [3, 7]]])
    assert found == [2, 1, 1, 2, 1, 0]
    report = report_of(world)
    assert report.misses == [Miss(ExpertKey(0, e), s) for e, s in ((5, 2), (3, 1), (7, 0))]
    assert report.uses_LE[0].tolist() == [0, 0, 0, 3, 0, 2, 0, 1]
    assert report.routing_LP[0].tolist() == [5, 3, 3, 5, 3, 7] + 10 * [-1]
    assert report.lost_row is None
    assert not report_of(world).uses_LE.any()


@pytest.mark.parametrize("kernels", KINDS)
def test_a_miss_is_copied_into_its_slot_and_a_hit_is_not(kernels):
    world = world_for(kernels)
    world.table.free([0, 1])
    step(kernels, world, [[[5, 3]]])
    assert torch.equal(world.slots[1].cpu(), world.bytes_of(ExpertKey(0, 5)))
    assert torch.equal(world.slots[0].cpu(), world.bytes_of(ExpertKey(0, 3)))
    assert not world.slots[2:].any()
    world.slots.fill_(7)
    assert step(kernels, world, [[[3, 5]]]) == [[0, 1]]
    assert (world.slots == 7).all()


@pytest.mark.parametrize("kernels", KINDS)
def test_without_a_free_slot_an_expert_is_read_from_host_memory(kernels):
    world = world_for(kernels)
    world.table.free([4])
    (found,) = step(kernels, world, [[[1, 2], [2, 1]]])
    assert found == [4, ExpertKey(0, 2), ExpertKey(0, 2), 4]
    assert [miss.slot_id for miss in report_of(world).misses] == [4, ABSENT]


@pytest.mark.parametrize("kernels", KINDS)
def test_a_barred_expert_takes_no_slot(kernels):
    world = world_for(kernels)
    world.table.free([0, 1])
    world.table.bar([ExpertKey(0, 2)])
    assert step(kernels, world, [[[2, 1]]]) == [[ExpertKey(0, 2), 1]]
    assert [miss.slot_id for miss in report_of(world).misses] == [BARRED, 1]
    world.table.admit([ExpertKey(0, 2)])
    assert step(kernels, world, [[[2, 1]]]) == [[0, 1]]


@pytest.mark.parametrize("kernels", KINDS)
def test_an_expert_on_disk_loses_the_step_from_its_row_on(kernels):
    world = world_for(kernels)
    world.table.free([0, 1, 2])
    on_disk = ExpertKey(1, 2)
    world.table.set_host_addresses({on_disk: 0})
    found = step(kernels, world, [[[2, 1]], [[2, 4]], [[3, 5]]])
    assert found == [[2, 1], [None, 0], [None, None]]
    report = report_of(world)
    assert report.lost_row == 1
    assert report.misses[2:] == [Miss(on_disk, ON_DISK), Miss(ExpertKey(1, 4), 0)]
    assert not report.uses_LE[2].any()
    assert (report.routing_LP[2] == -1).all()
    world.table.set_host_addresses({on_disk: world.address_of(on_disk)})
    again = step(kernels, world, [[[2, 1]], [[2, 4]], [[3, 5]]])
    assert again == [[2, 1], [on_disk, 0], [ExpertKey(2, 3), ExpertKey(2, 5)]]
    assert report_of(world).lost_row is None


@pytest.mark.parametrize("kernels", KINDS)
def test_a_pair_without_an_expert_is_nowhere(kernels):
    world = world_for(kernels)
    world.table.free([0])
    assert step(kernels, world, [[[-1, 2], [-1, -1]]]) == [[None, 0, None, None]]
    assert report_of(world).misses == [Miss(ExpertKey(0, 2), 0)]


@pytest.mark.parametrize("kernels", KINDS)
def test_a_full_log_keeps_slots_from_being_taken(kernels):
    world = world_for(kernels, max_misses=1)
    world.table.free([0, 1, 2])
    assert step(kernels, world, [[[4, 5]], [[6, 4]]])[1] == [ExpertKey(1, 6), ExpertKey(1, 4)]
    report = report_of(world)
    assert (report.misses, report.num_misses) == ([Miss(ExpertKey(0, 4), 2)], 4)
    assert step(kernels, world, [[[4, 5]]]) == [[2, 1]]


# Both, state for state


def routings(experts: int = 8, max_tokens: int = 8, max_k: int = 8):
    """A step's [T, K] ids of each of three rows, -1 among them."""

    def row(shape):
        ids = st.lists(st.integers(-1, experts - 1), min_size=shape[1], max_size=shape[1])
        return st.lists(st.lists(ids, min_size=shape[0], max_size=shape[0]), min_size=3, max_size=3)

    return st.tuples(st.integers(1, max_tokens), st.integers(1, max_k)).flatmap(row)


@settings(max_examples=25)
@given(
    steps=st.lists(routings(), min_size=1, max_size=3),
    num_free=st.integers(0, 12),
    on_disk=st.sets(st.integers(0, 23), max_size=1),
    barred=st.sets(st.integers(0, 23), max_size=5),
    max_misses=st.sampled_from([None, 0, 5]),
)
def test_the_kernels_do_what_their_twins_do(steps, num_free, on_disk, barred, max_misses):
    worlds = {
        kernels: world_for(kernels, slots=12, max_pairs=64, max_misses=max_misses)
        for kernels in (triton_resolve, slot_reference)
    }
    for world in worlds.values():
        world.table.free(list(range(num_free)))
        world.table.bar([world.keys[cell] for cell in barred])
        world.table.set_host_addresses({world.keys[cell]: 0 for cell in on_disk})
    for routing in steps:
        found = [step(kernels, world, routing) for kernels, world in worlds.items()]
        assert found[0] == found[1]
        states = [world.state() for world in worlds.values()]
        assert states[0] == states[1]


# The protocol


class Model:
    """What device and host do, told with dicts."""

    def __init__(self, world: World) -> None:
        self.on_disk: set[ExpertKey] = set()
        self.barred: set[ExpertKey] = set()
        self.resident: dict[ExpertKey, int] = {}
        self.free: list[int] = []
        self.reserved = set(range(len(world.slots)))
        self.misses: list[Miss] = []
        self.lost_row: int | None = None

    def pair(self, key: ExpertKey) -> object:
        if key.expert_idx < 0 or self.lost_row not in (None, key.moe_row):
            return None
        if key not in self.resident:
            if key in self.on_disk:
                self.lost_row = key.moe_row
                self.log(Miss(key, ON_DISK))
                return None
            if key in self.barred or not self.free:
                self.log(Miss(key, BARRED if key in self.barred else ABSENT))
                return key
            self.resident[key] = self.free.pop()
            self.misses.append(Miss(key, self.resident[key]))
        return self.resident[key]

    def log(self, miss: Miss) -> None:
        """Once per row and step; a step visits a row once."""
        if miss not in self.misses:
            self.misses.append(miss)

    def step(self, routing) -> list[list[object]]:
        found = []
        for row, index_TK in enumerate(routing):
            keys = [ExpertKey(row, expert) for index_K in index_TK for expert in index_K]
            is_lost = self.lost_row is not None
            found.append([None if is_lost else self.pair(key) for key in keys])
        return found


def act_as_host(data, world: World, model: Model) -> None:
    """Anything a policy may do between two steps."""
    table, draw = world.table, data.draw

    def some(things):
        things = sorted(things)
        picked = draw(st.sets(st.integers(0, len(things) - 1), max_size=4)) if things else set()
        return [things[i] for i in sorted(picked)]

    leaving = some(model.resident)
    assert table.withdraw(leaving) == [model.resident[key] for key in leaving]
    model.reserved.update(model.resident.pop(key) for key in leaving)
    absent = set(world.keys) - set(model.resident)
    placed = dict(zip(some(absent - model.barred), some(model.reserved), strict=False))
    for key, slot in placed.items():
        world.slots[slot].copy_(world.bytes_of(key))
    table.place(placed)
    model.resident.update(placed)
    model.reserved.difference_update(placed.values())
    freed = some(model.reserved)
    table.free(freed)
    model.free += freed
    model.reserved.difference_update(freed)
    table.admit(sorted(model.barred - set(model.resident)))
    model.barred = set(some(set(world.keys) - set(model.resident)))
    table.bar(sorted(model.barred))
    on_disk = set(some(world.keys)) if draw(st.booleans()) else set()
    changed = model.on_disk ^ on_disk
    addresses = {key: 0 if key in on_disk else world.address_of(key) for key in changed}
    table.set_host_addresses(addresses)
    model.on_disk = on_disk


@pytest.mark.parametrize("kernels", KINDS)
@settings(max_examples=15)
@given(data=st.data())
def test_host_and_device_agree_whatever_the_host_decides(kernels, data):
    world = world_for(kernels, slots=7)
    model = Model(world)
    for _ in range(data.draw(st.integers(1, 6))):
        act_as_host(data, world, model)
        world.table.check_invariants()
        routing = data.draw(routings(max_tokens=3, max_k=4))
        assert step(kernels, world, routing) == model.step(routing)
        report = report_of(world)
        assert report.misses == model.misses
        assert report.lost_row == model.lost_row
        assert dict(world.table.resident) == model.resident
        for key, slot in model.resident.items():
            assert torch.equal(world.slots[slot].cpu(), world.bytes_of(key))
        model.misses, model.lost_row = [], None


def test_a_late_report_is_still_right():
    """The host acts on the report of step 1 when step 2 is already under way."""
    world, kernels = World("cpu"), slot_reference
    world.table.free([0, 1])
    step(kernels, world, [[[1]]])
    world.table.begin_read()
    step(kernels, world, [[[2]]])
    assert world.table.finish_read().misses == [Miss(ExpertKey(0, 1), 1)]
    world.table.free(world.table.withdraw([ExpertKey(0, 1)]))
    assert step(kernels, world, [[[1]]]) == [[1]]
    report = report_of(world)
    assert report.misses == [Miss(ExpertKey(0, 2), 0), Miss(ExpertKey(0, 1), 1)]


@pytest.mark.gpu
@needs_gpu
def test_a_captured_step_follows_what_changes_around_it():
    captured, plain = World("cuda"), World("cuda")
    routing = [torch.zeros(1, 4, dtype=torch.int64, device="cuda") for _ in range(3)]

    def whole_step(world: World) -> list[torch.Tensor]:
        found = []
        for row, index_TK in enumerate(routing):
            pointers_TK = triton_resolve.resolve(world.table, row, index_TK)
            triton_resolve.fill(world.table, pointers_TK)
            found.append(pointers_TK.clone())
        return found

    whole_step(World("cuda"))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = whole_step(captured)
    generator = torch.Generator().manual_seed(0)
    for world in (captured, plain):
        world.table.free([0, 1, 2, 3, 4, 5])
    for _ in range(10):
        for index_TK in routing:
            index_TK.copy_(torch.randperm(8, generator=generator)[:4].view(1, 4))
        graph.replay()
        expected = whole_step(plain)
        assert [captured.places(p) for p in found] == [plain.places(p) for p in expected]
        assert captured.state() == plain.state()
        for world in (captured, plain):
            report_of(world)
            leaving = sorted(world.table.resident)[: max(0, 3 - world.table.num_free_known)]
            world.table.free(world.table.withdraw(leaving))
