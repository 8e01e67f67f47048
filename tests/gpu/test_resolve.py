"""The device's own part of the cache: resolve and fill against their reference, state for state.

Without a GPU the kernels run in Triton's interpreter; with one, compiled, and in a CUDA graph.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_infinity.experts import ExpertKey
from moe_infinity.gpu.device_table import ABSENT, NOT_REPORTED, NOTHING
from moe_infinity.gpu.kernels import reference
from tests.gpu.device_tables import World, random_scores, routings, step

pytest.importorskip("triton", reason="needs triton")
from moe_infinity.gpu.kernels import resolve as triton_resolve

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = [pytest.param(reference, id="reference"), pytest.param(triton_resolve, id="triton")]
pytestmark = pytest.mark.triton
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs them one after the other."""
    monkeypatch.setattr(triton_resolve, "FILL_PROGRAMS", 2)
    monkeypatch.setattr(triton_resolve, "FILL_BYTES", 16)


def world_for(kernels, **sizes) -> World:
    return World(DEVICE if kernels is triton_resolve else "cpu", **sizes)


@pytest.mark.parametrize("kernels", KINDS)
def test_an_expert_that_several_tokens_miss_takes_one_slot(kernels):
    world = world_for(kernels)
    (found,) = step(kernels, world, [[[5, 3], [3, 5], [3, 7]]])
    assert found == [1, 0, 0, 1, 0, 2]
    assert world.table.uses_E.tolist() == [0, 0, 0, 3, 0, 2, 0, 1]
    slots = [NOTHING, NOTHING, NOTHING, 0, NOTHING, 1, NOTHING, 2]
    assert world.table.reports_LW[0].tolist() == [
        *slots, 5, 3, 3, 5, 3, 7, *10 * [NOT_REPORTED],
    ]  # fmt: skip
    assert (world.table.reports_LW[1:] == NOT_REPORTED).all()
    report, *others = world.reports(6)
    assert report is not None
    assert report.expert_P.tolist() == [5, 3, 3, 5, 3, 7]
    assert report.misses == {ExpertKey(0, 3): 0, ExpertKey(0, 5): 1, ExpertKey(0, 7): 2}
    assert others == [None, None]
    assert (world.table.reports_LW == NOT_REPORTED).all()


@pytest.mark.parametrize("kernels", KINDS)
def test_a_miss_is_copied_into_its_slot_and_a_hit_is_not(kernels):
    world = world_for(kernels)
    step(kernels, world, [[[5, 3]]])
    assert torch.equal(world.slots[0].cpu(), world.bytes_of(ExpertKey(0, 3)))
    assert torch.equal(world.slots[1].cpu(), world.bytes_of(ExpertKey(0, 5)))
    assert not world.slots[2:].any()
    world.slots.fill_(7)
    assert step(kernels, world, [[[3, 5]]]) == [[0, 1]]
    assert (world.slots == 7).all()


@pytest.mark.parametrize("kernels", KINDS)
def test_uploaded_residency_is_where_experts_are(kernels):
    world = world_for(kernels, slots=3)
    step(kernels, world, [[[5, 3]]])
    world.upload({ExpertKey(0, 6): 1})
    assert step(kernels, world, [[[6, 5, 3, 7]]]) == [[1, 2, 0, ExpertKey(0, 7)]]
    assert [slot for _, slot in world.misses(4)] == [0, 2, ABSENT]


# Who leaves


@pytest.mark.parametrize("kernels", KINDS)
def test_a_miss_takes_a_free_slot_and_then_that_of_the_lowest_score(kernels):
    world = world_for(kernels, slots=4)
    world.upload({ExpertKey(2, 0): 0, ExpertKey(2, 1): 1, ExpertKey(2, 2): 3})
    world.upload_scores([7, 4, 5, 0, 0, 0, 0, 0])
    assert step(kernels, world, [[[1, 2, 3]]]) == [[2, 1, 3]]
    assert world.table.resident_slots() == {
        ExpertKey(2, 0): 0, ExpertKey(0, 1): 2, ExpertKey(0, 2): 1, ExpertKey(0, 3): 3,
    }  # fmt: skip


@pytest.mark.parametrize("kernels", KINDS)
def test_equal_scores_leave_in_the_order_of_slots(kernels):
    world = world_for(kernels, slots=3)
    world.upload({ExpertKey(2, 0): 2, ExpertKey(2, 1): 0, ExpertKey(2, 2): 1})
    assert step(kernels, world, [[[1, 2]]]) == [[0, 1]]


@pytest.mark.parametrize("kernels", KINDS)
def test_of_its_own_layer_only_what_the_step_does_not_use_is_evicted(kernels):
    world = world_for(kernels, slots=3)
    world.upload({ExpertKey(0, 0): 0, ExpertKey(0, 1): 1, ExpertKey(0, 2): 2})
    world.upload_scores([0, 1, 2, 3, 4, 5, 6, 7])
    assert step(kernels, world, [[[3, 2], [4, 0]]]) == [[1, 2, ExpertKey(0, 4), 0]]
    world.reports(4)
    assert step(kernels, world, [[[5, 6], [7, 1]]]) == [[2, 1, ExpertKey(0, 7), 0]]


@pytest.mark.parametrize("kernels", KINDS)
def test_layers_that_come_before_the_next_scores_keep_their_experts(kernels):
    """Five layers are two parts. Layer 0 takes its own slot and 2's; 2 takes 1's, then 0's two."""
    world = world_for(kernels, layers=5, slots=5)
    assert world.table.last_layers == [1, 4]
    assert list(map(world.table.part_of, range(5))) == [0, 0, 1, 1, 1]
    world.upload({ExpertKey(layer, 0): layer for layer in range(5)})
    world.upload_scores([1, 0, 0, 0, 0, 0, 0, 0], [0, 9, 9, 0, 0, 0, 0, 0])
    found = step(kernels, world, [[[1, 2]], [[-1]], [[1, 2, 3]]])
    assert found == [[0, 2], [None], [1, 0, 2]]
    world.upload_scores([0, 9, 9, 9, 9, 9, 9, 9])
    assert step(kernels, world, [[[0]]]) == [[3]]  # layer 3's may leave in the other part


@pytest.mark.parametrize("kernels", KINDS)
def test_the_lowest_of_many_slots_is_found(kernels):
    world = world_for(kernels, layers=4, experts=900, slots=2700)
    keys = [key for key in world.keys if key.moe_layer_idx]
    world.upload({key: slot for slot, key in enumerate(keys)})
    # in float32 some would be equal
    scores = np.random.default_rng(0).permutation(4 * 900).reshape(4, 1, 900) / 64 + 2.0**40
    world.upload_all_scores(np.repeat(scores, 2, 1))
    leaving = sorted((k for k in keys if k.moe_layer_idx != 1), key=lambda key: scores[:, 0][key])[
        :6
    ]
    slots = [keys.index(key) for key in leaving]
    assert max(slots) > 2 * triton_resolve.SLOT_BLOCK
    assert step(kernels, world, [[[3, 1, 4, 0, 5, 9]]]) == [[slots[n] for n in (2, 1, 3, 0, 4, 5)]]


@pytest.mark.parametrize("kernels", KINDS)
def test_a_score_of_inf_keeps_an_expert(kernels):
    world = world_for(kernels, slots=2)
    world.upload({ExpertKey(2, 0): 0, ExpertKey(2, 1): 1})
    world.upload_scores([np.inf, 1, 2, 3, 4, 5, 6, 7])
    assert step(kernels, world, [[[3, 4]]]) == [[1, ExpertKey(0, 4)]]
    assert [slot for _, slot in world.misses(2)] == [1, ABSENT]


@pytest.mark.parametrize("kernels", KINDS)
def test_an_expert_that_was_evicted_is_a_miss_later_in_the_step(kernels):
    world = world_for(kernels, slots=1)
    world.upload({ExpertKey(2, 4): 0})
    assert step(kernels, world, [[[1]], [[-1]], [[4]]]) == [[0], [None], [0]]
    assert world.misses(1) == [(ExpertKey(0, 1), 0), (ExpertKey(2, 4), 0)]


@pytest.mark.parametrize("kernels", KINDS)
def test_a_layer_is_reported_when_all_its_words_are(kernels):
    world = world_for(kernels)
    assert world.table.read_report(0, 3) is None
    step(kernels, world, [[[2, 1, 2]]])
    assert world.table.read_report(0, 4) is None
    for place in (0, 7, 8, 10):
        word = int(world.table.reports_LW[0, place])
        world.table.reports_LW[0, place] = NOT_REPORTED
        assert world.table.read_report(0, 3) is None
        world.table.reports_LW[0, place] = word
    assert world.report(0, 3).misses == {ExpertKey(0, 1): 0, ExpertKey(0, 2): 1}


@pytest.mark.parametrize("kernels", KINDS)
def test_scores_of_some_layers_are_used_while_a_step_runs(kernels):
    world = world_for(kernels, slots=3)
    world.upload({ExpertKey(1, 5): 0, ExpertKey(2, 5): 1, ExpertKey(2, 6): 2})
    world.upload_scores([0, 0, 0, 0, 0, 5, 6, 0])
    assert step(kernels, world, [[[0]]]) == [[0]]
    world.upload_all_scores(np.full((1, 2, 8), 9.0), first_layer=0)
    world.upload_all_scores(np.full((1, 2, 8), 7.0), first_layer=2)
    kernels.resolve(world.table, 2, world.index([[1]]))
    assert world.table.resident_slots() == {
        ExpertKey(0, 0): 0, ExpertKey(2, 1): 1, ExpertKey(2, 6): 2,
    }  # fmt: skip


@pytest.mark.parametrize("kernels", KINDS)
def test_a_pair_without_an_expert_is_nowhere(kernels):
    world = world_for(kernels)
    assert step(kernels, world, [[[-1, 2], [-1, -1]]]) == [[None, 0, None, None]]
    assert world.misses(4) == [(ExpertKey(0, 2), 0)]


# Both, state for state


@settings(max_examples=12)
@given(
    steps=st.lists(routings(), min_size=1, max_size=3),
    num_slots=st.integers(1, 12),
    num_resident=st.integers(0, 12),
    seed=st.integers(0, 99),
)
def test_the_kernels_do_what_their_reference_does(steps, num_slots, num_resident, seed):
    worlds = {
        kernels: world_for(kernels, slots=num_slots, max_pairs=64)
        for kernels in (triton_resolve, reference)
    }
    for world in worlds.values():
        keys = np.random.default_rng(seed).permutation(len(world.keys))[:num_resident]
        world.upload(dict(zip((world.keys[at] for at in keys), range(num_slots), strict=False)))
        world.upload_all_scores(random_scores(world, seed))
    for routing in steps:
        found = [step(kernels, world, routing) for kernels, world in worlds.items()]
        assert found[0] == found[1]
        states = [world.state() for world in worlds.values()]
        assert states[0] == states[1]


@pytest.mark.gpu
@needs_gpu
def test_a_captured_step_sees_what_changes_around_it():
    captured, plain = World("cuda"), World("cuda")
    routing = [torch.zeros(1, 4, dtype=torch.int64, device="cuda") for _ in range(3)]

    def whole_step(world: World) -> list[torch.Tensor]:
        found = []
        for layer, index_TK in enumerate(routing):
            pointers_E = triton_resolve.resolve(world.table, layer, index_TK)
            triton_resolve.fill(world.table, index_TK.numel())
            found.append(pointers_E.clone())
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
            world.upload_all_scores(random_scores(world, n))
        graph.replay()
        expected = whole_step(plain)
        assert [captured.places(p) for p in found] == [plain.places(p) for p in expected]
        assert captured.state() == plain.state()
        for world in (captured, plain):
            world.reports(4)
