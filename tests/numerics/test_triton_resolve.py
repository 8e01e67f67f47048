"""The device's own part of the cache: resolve and fill against their twins, state for state, and
the protocol of host and device against a few dicts.

Without a GPU the kernels run in Triton's interpreter; with one, compiled, and in a CUDA graph.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.experts import ExpertKey
from moe_infinity.kernels import slot_reference
from moe_infinity.kernels.device_table import ABSENT, NOT_RUN, ON_DISK, Miss
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


def offer(world: World, *scores) -> None:
    """Scores by expert, the same for all rows; one list for each part, or one for all."""
    shape = world.table.scores_HLE.shape
    told = np.array(scores, dtype=np.float64)[:, None, :]
    world.table.offer(np.ascontiguousarray(np.broadcast_to(told, shape)))


@pytest.mark.parametrize("kernels", KINDS)
def test_an_expert_that_several_tokens_miss_takes_one_slot(kernels):
    world = world_for(kernels)
    (found,) = step(kernels, world, [[[5, 3], [3, 5], [3, 7]]])
    assert found == [0, 1, 1, 0, 1, 2]
    assert world.table.uses_LE[0].tolist() == [0, 0, 0, 3, 0, 2, 0, 1]
    report = report_of(world)
    assert report.misses == [Miss(ExpertKey(0, e), s) for e, s in ((5, 0), (3, 1), (7, 2))]
    assert report.routing_LP[0].tolist() == [5, 3, 3, 5, 3, 7] + 10 * [NOT_RUN]
    assert report.lost_row is None
    assert not world.table.uses_LE.any()


@pytest.mark.parametrize("kernels", KINDS)
def test_a_miss_is_copied_into_its_slot_and_a_hit_is_not(kernels):
    world = world_for(kernels)
    step(kernels, world, [[[5, 3]]])
    assert torch.equal(world.slots[0].cpu(), world.bytes_of(ExpertKey(0, 5)))
    assert torch.equal(world.slots[1].cpu(), world.bytes_of(ExpertKey(0, 3)))
    assert not world.slots[2:].any()
    world.slots.fill_(7)
    assert step(kernels, world, [[[3, 5]]]) == [[1, 0]]
    assert (world.slots == 7).all()


@pytest.mark.parametrize("kernels", KINDS)
def test_what_the_host_tells_is_where_experts_are(kernels):
    world = world_for(kernels, slots=3)
    step(kernels, world, [[[5, 3]]])
    world.tell({ExpertKey(0, 6): 1})
    assert step(kernels, world, [[[6, 5, 3, 7]]]) == [[1, 0, 2, ExpertKey(0, 7)]]
    assert [miss.slot_id for miss in report_of(world).misses] == [0, 2, ABSENT]


# Who leaves


@pytest.mark.parametrize("kernels", KINDS)
def test_a_miss_takes_a_free_slot_and_then_that_of_the_lowest_score(kernels):
    world = world_for(kernels, slots=4)
    world.tell({ExpertKey(2, 0): 0, ExpertKey(2, 1): 1, ExpertKey(2, 2): 3})
    offer(world, [7, 4, 5, 0, 0, 0, 0, 0])
    assert step(kernels, world, [[[1, 2, 3]]]) == [[2, 1, 3]]
    assert world.table.resident_slots() == {
        ExpertKey(2, 0): 0, ExpertKey(0, 1): 2, ExpertKey(0, 2): 1, ExpertKey(0, 3): 3,
    }  # fmt: skip


@pytest.mark.parametrize("kernels", KINDS)
def test_equal_scores_leave_in_the_order_of_slots(kernels):
    world = world_for(kernels, slots=3)
    world.tell({ExpertKey(2, 0): 2, ExpertKey(2, 1): 0, ExpertKey(2, 2): 1})
    assert step(kernels, world, [[[1, 2]]]) == [[0, 1]]


@pytest.mark.parametrize("kernels", KINDS)
def test_of_its_own_row_only_what_the_step_does_not_use_leaves(kernels):
    world = world_for(kernels, slots=3)
    world.tell({ExpertKey(0, 0): 0, ExpertKey(0, 1): 1, ExpertKey(0, 2): 2})
    offer(world, [0, 1, 2, 3, 4, 5, 6, 7])
    assert step(kernels, world, [[[3, 2], [4, 0]]]) == [[1, 2, ExpertKey(0, 4), 0]]
    report_of(world)
    assert step(kernels, world, [[[5, 6], [7, 1]]]) == [[0, 2, 1, ExpertKey(0, 1)]]


@pytest.mark.parametrize("kernels", KINDS)
def test_rows_that_come_before_the_next_scores_keep_their_experts(kernels):
    """Five rows are two parts. Row 0 takes its own slot and row 2's; 2 takes 1's, then 0's two."""
    world = world_for(kernels, rows=5, slots=5)
    assert world.table.last_rows == [1, 4]
    assert list(map(world.table.part_of, range(5))) == [0, 0, 1, 1, 1]
    world.tell({ExpertKey(row, 0): row for row in range(5)})
    offer(world, [1, 0, 0, 0, 0, 0, 0, 0], [0, 9, 9, 0, 0, 0, 0, 0])
    found = step(kernels, world, [[[1, 2]], [[-1]], [[1, 2, 3]]])
    assert found == [[0, 2], [None], [1, 0, 2]]
    offer(world, [0, 9, 9, 9, 9, 9, 9, 9])
    assert step(kernels, world, [[[0]]]) == [[3]]  # row 3's may leave in the other part


@pytest.mark.parametrize("kernels", KINDS)
def test_the_lowest_of_many_slots_is_found(kernels):
    world = world_for(kernels, rows=4, experts=900, slots=2700)
    keys = [key for key in world.keys if key.moe_row]
    world.tell({key: slot for slot, key in enumerate(keys)})
    # float32 could not tell them apart
    scores = np.random.default_rng(0).permutation(4 * 900).reshape(1, 4, 900) / 64 + 2.0**40
    world.table.offer(np.repeat(scores, 2, 0))
    leaving = sorted((k for k in keys if k.moe_row != 1), key=lambda key: scores[0][key])[:6]
    slots = [keys.index(key) for key in leaving]
    assert max(slots) > 2 * triton_resolve.SLOT_BLOCK
    assert step(kernels, world, [[[3, 1, 4, 0, 5, 9]]]) == [slots]


@pytest.mark.parametrize("kernels", KINDS)
def test_a_score_of_inf_keeps_an_expert(kernels):
    world = world_for(kernels, slots=2)
    world.tell({ExpertKey(2, 0): 0, ExpertKey(2, 1): 1})
    offer(world, [np.inf, 1, 2, 3, 4, 5, 6, 7])
    assert step(kernels, world, [[[3, 4]]]) == [[1, ExpertKey(0, 4)]]
    assert [miss.slot_id for miss in report_of(world).misses] == [1, ABSENT]


@pytest.mark.parametrize("kernels", KINDS)
def test_who_was_evicted_is_a_miss_later_in_the_step(kernels):
    world = world_for(kernels, slots=1)
    world.tell({ExpertKey(2, 4): 0})
    assert step(kernels, world, [[[1]], [[-1]], [[4]]]) == [[0], [None], [0]]
    assert report_of(world).misses == [Miss(ExpertKey(0, 1), 0), Miss(ExpertKey(2, 4), 0)]


@pytest.mark.parametrize("kernels", KINDS)
def test_an_expert_on_disk_loses_the_step_from_its_row_on(kernels):
    world = world_for(kernels, slots=3)
    on_disk = ExpertKey(1, 2)
    world.table.set_host_addresses({on_disk: 0})
    found = step(kernels, world, [[[2, 1]], [[2, 4]], [[3, 5]]])
    assert found == [[0, 1], [None, 2], [None, None]]
    uses_LE = world.table.uses_LE.clone()
    report = report_of(world)
    assert report.lost_row == 1
    assert report.misses[2:] == [Miss(on_disk, ON_DISK), Miss(ExpertKey(1, 4), 2)]
    assert not uses_LE[2].any()
    assert report.routing_LP[2].tolist() == 2 * [-1] + 14 * [NOT_RUN]
    world.table.set_host_addresses({on_disk: world.address_of(on_disk)})
    again = step(kernels, world, [[[2, 1]], [[2, 4]], [[3, 5]]])
    assert again == [[0, 1], [0, 2], [0, 1]]
    assert report_of(world).lost_row is None


@pytest.mark.parametrize("kernels", KINDS)
def test_a_pair_without_an_expert_is_nowhere(kernels):
    world = world_for(kernels)
    assert step(kernels, world, [[[-1, 2], [-1, -1]]]) == [[None, 0, None, None]]
    assert report_of(world).misses == [Miss(ExpertKey(0, 2), 0)]


@pytest.mark.parametrize("kernels", KINDS)
def test_a_full_log_keeps_slots_from_being_taken(kernels):
    world = world_for(kernels, max_misses=1)
    assert step(kernels, world, [[[4, 5]], [[6, 4]]])[1] == [ExpertKey(1, 6), ExpertKey(1, 4)]
    report = report_of(world)
    assert report.misses == [Miss(ExpertKey(0, 4), 0)]
    assert step(kernels, world, [[[4, 5]]]) == [[0, 1]]


# Both, state for state


def routings(experts: int = 8, max_tokens: int = 8, max_k: int = 8):
    """A step's [T, K] ids of each of three rows, -1 among them."""

    def row(shape):
        ids = st.lists(st.integers(-1, experts - 1), min_size=shape[1], max_size=shape[1])
        return st.lists(st.lists(ids, min_size=shape[0], max_size=shape[0]), min_size=3, max_size=3)

    return st.tuples(st.integers(1, max_tokens), st.integers(1, max_k)).flatmap(row)


def random_scores(world: World, seed: int) -> np.ndarray:
    """With equal ones among them."""
    chances = np.random.default_rng(seed)
    return chances.integers(0, 6, world.table.scores_HLE.shape).astype(np.float64)


@settings(max_examples=12)
@given(
    steps=st.lists(routings(), min_size=1, max_size=3),
    num_slots=st.integers(1, 12),
    num_resident=st.integers(0, 12),
    on_disk=st.sets(st.integers(0, 23), max_size=1),
    max_misses=st.sampled_from([None, 0, 5]),
    seed=st.integers(0, 99),
)
def test_the_kernels_do_what_their_twins_do(
    steps, num_slots, num_resident, on_disk, max_misses, seed
):
    worlds = {
        kernels: world_for(kernels, slots=num_slots, max_pairs=64, max_misses=max_misses)
        for kernels in (triton_resolve, slot_reference)
    }
    for world in worlds.values():
        keys = np.random.default_rng(seed).permutation(len(world.keys))[:num_resident]
        world.tell(dict(zip((world.keys[at] for at in keys), range(num_slots), strict=False)))
        world.table.offer(random_scores(world, seed))
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
        self.last_rows = world.table.last_rows
        self.scores = np.zeros(world.table.scores_HLE.shape)
        self.on_disk: set[ExpertKey] = set()
        self.slots: list[ExpertKey | None] = [None] * len(world.slots)
        self.misses: list[Miss] = []
        self.lost_row: int | None = None

    def resident(self) -> dict[ExpertKey, int]:
        return {key: slot for slot, key in enumerate(self.slots) if key is not None}

    def step(self, routing) -> list[list[object]]:
        found = []
        for row, index_TK in enumerate(routing):
            used = [ExpertKey(row, expert) for index_K in index_TK for expert in index_K]
            is_lost = self.lost_row is not None
            found.append([None if is_lost else self.pair(key, used) for key in used])
        return found

    def pair(self, key: ExpertKey, used: list[ExpertKey]) -> object:
        if key.expert_idx < 0:
            return None
        if key in self.slots:
            return self.slots.index(key)
        if key in self.on_disk:
            self.lost_row = key.moe_row
            self.log(Miss(key, ON_DISK))
            return None
        slot = self.taken(key, used)
        self.log(Miss(key, slot))
        if slot == ABSENT:
            return key
        self.slots[slot] = key
        return slot

    def taken(self, key: ExpertKey, used: list[ExpertKey]) -> int:
        if None in self.slots:
            return self.slots.index(None)
        part = next(p for p, last_row in enumerate(self.last_rows) if key.moe_row <= last_row)
        stay = range(key.moe_row + 1, self.last_rows[part] + 1)
        leaving = [k for k in self.slots if k and k.moe_row not in stay and k not in used]
        lowest = min((self.scores[part][k] for k in leaving), default=None)
        return next(
            (self.slots.index(k) for k in leaving if self.scores[part][k] == lowest), ABSENT
        )

    def log(self, miss: Miss) -> None:
        """Once per row and step; a step visits a row once."""
        if miss.key not in [told.key for told in self.misses]:
            self.misses.append(miss)


def act_as_host(data, world: World, model: Model) -> None:
    """Anything it may do between two steps."""
    if data.draw(st.booleans()):
        model.scores = random_scores(world, data.draw(st.integers(0, 99)))
        world.table.offer(model.scores)
    if data.draw(st.integers(0, 3)) == 0:
        order = data.draw(st.permutations(world.keys))
        told = dict(zip(order, data.draw(st.sets(st.sampled_from(range(7)))), strict=False))
        for key, slot in told.items():
            world.slots[slot].copy_(world.bytes_of(key))
        world.tell(told)
        model.slots, model.on_disk = [None] * len(model.slots), set()
        for key, slot in told.items():
            model.slots[slot] = key
    on_disk = data.draw(st.sets(st.sampled_from(world.keys), max_size=4))
    changed = model.on_disk ^ on_disk
    addresses = {key: 0 if key in on_disk else world.address_of(key) for key in changed}
    world.table.set_host_addresses(addresses)
    model.on_disk = on_disk


@pytest.mark.parametrize("kernels", KINDS)
@settings(max_examples=8)
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
        assert world.table.resident_slots() == model.resident()
        for key, slot in model.resident().items():
            assert torch.equal(world.slots[slot].cpu(), world.bytes_of(key))
        model.misses, model.lost_row = [], None


def test_a_late_report_is_still_right():
    """The host hears of step 1 when step 2 is already under way, which evicted what 1 brought."""
    world, kernels = World("cpu", slots=2), slot_reference
    world.tell({ExpertKey(2, 7): 1})
    step(kernels, world, [[[1, 2]]])
    world.table.begin_read()
    step(kernels, world, [[[3]]])
    assert world.table.finish_read().misses == [Miss(ExpertKey(0, 1), 0), Miss(ExpertKey(0, 2), 1)]
    offer(world, [0, 9, 0, 1, 0, 0, 0, 0])
    assert step(kernels, world, [[[5]]]) == [[1]]
    report = report_of(world)
    assert report.misses == [Miss(ExpertKey(0, 3), 0), Miss(ExpertKey(0, 5), 1)]


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
    for n in range(10):
        for index_TK in routing:
            index_TK.copy_(torch.randperm(8, generator=generator)[:4].view(1, 4))
        for world in (captured, plain):
            world.table.offer(random_scores(world, n))
        graph.replay()
        expected = whole_step(plain)
        assert [captured.places(p) for p in found] == [plain.places(p) for p in expected]
        assert captured.state() == plain.state()
        for world in (captured, plain):
            report_of(world)
