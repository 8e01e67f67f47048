"""Slots give way to what a step needs, down to an eighth of them, and come back."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moe_infinity import MoE
from moe_infinity.cache.policies import make_policy
from moe_infinity.cache.residency import ResidencyTable
from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertKey, Phase, Step, Tier
from moe_infinity.memory import room as room_module
from moe_infinity.memory.needs import KvBytes, StepBytes, kv_bytes_of
from moe_infinity.memory.room import DECODE_STEPS, ProcessMemory, Room, margin_of
from moe_infinity.memory.slots import HostSlots
from moe_infinity.memory.tiers import SlotTier
from moe_infinity.system import linux
from moe_infinity.system.machine import machine_memory_bytes, own_bytes

MIB = 1 << 20
NUM_SLOTS, NUM_EXPERTS = 16, 32
NEEDS = StepBytes(
    kv=KvBytes(per_token=MIB, per_window_token=0, window=0),
    per_token=2 * MIB,
    per_part=2 * MIB,
    per_waiting=0,
    per_context=0,
    per_earlier=0,
    per_pair=0,
    is_causal=True,
    logits=0,
    least=0,
)
on_linux = pytest.mark.skipif(not linux.is_linux(), reason="only Linux takes single slots")


class Free:
    """Memory of which so much is free while all slots are filled."""

    num_bytes = 1000 * MIB

    def __init__(self, table: ResidencyTable, free: int) -> None:
        self.free = free
        self.table = table

    def left(self) -> int:
        return self.free + self.table.num_withdrawn * MIB


def make_room(
    free: int, *, num_slots: int = NUM_SLOTS, num_layers: int = 1, blocks: Any = None
) -> tuple[Room, SlotTier]:
    policy = make_policy("lru", num_layers=1, num_experts=NUM_EXPERTS, num_slots=num_slots)
    table = ResidencyTable(num_slots, policy)
    for expert in range(num_slots):
        key = ExpertKey(0, expert)
        table.begin_load(key, Phase.DECODE)
        table.finish_load(key)
    slots = HostSlots(num_slots, MIB)
    mover: Any = SimpleNamespace()
    tier = SlotTier(Tier.HOST, slots, policy, table, mover)
    memory: Any = Free(table, free)
    room = Room(memory, NEEDS, tier, num_experts=NUM_EXPERTS, num_layers=num_layers, blocks=blocks)
    room._first_pass_bytes = 0
    return room, tier


def step_of(phase: Phase, num_tokens: int) -> Step:
    return Step(phase, 1, num_tokens, begins_B=np.ones(1, dtype=bool), context=num_tokens)


@on_linux
@pytest.mark.parametrize(("free", "num_left"), [(30, 16), (29, 15), (25, 11), (16, 2), (0, 2)])
def test_a_pass_gets_the_memory_of_as_many_slots_as_it_lacks(free, num_left):
    room, tier = make_room(free * MIB)
    room.make(step_of(Phase.PREFILL, 10))  # 30 MiB
    assert tier.table.num_slots == num_left
    tier.table.check_invariants()
    assert tier.occupancy().capacity == num_left


@on_linux
def test_the_first_pass_leaves_something_behind():
    room, tier = make_room(30 * MIB)
    room._first_pass_bytes = 2 * MIB
    room.make(step_of(Phase.PREFILL, 10))
    assert tier.table.num_slots == NUM_SLOTS - 2
    room.make(step_of(Phase.PREFILL, 10))
    assert tier.table.num_slots == NUM_SLOTS - 2


def test_a_pass_that_keeps_what_windows_pass_over_needs_memory_for_it():
    room, _ = make_room(30 * MIB)
    room.needs = replace(NEEDS, kv=KvBytes(per_token=0, per_window_token=MIB, window=4))
    assert room.tokens_at_once(20, 20, 20) == 20
    room.keeps_windows = True
    assert room.tokens_at_once(20, 20, 20) < 20


@on_linux
def test_before_a_layer_there_is_room_for_what_its_tokens_need():
    room, tier = make_room(7 * MIB)
    room.make_for_layer(5)
    assert tier.table.num_slots == NUM_SLOTS - 3


@on_linux
def test_decode_steps_take_slots_again_but_for_what_stays_free():
    room, tier = make_room(25 * MIB)
    room.make(step_of(Phase.PREFILL, 10))
    assert tier.table.num_slots == 11
    free: Any = room.memory
    free.free = 76 * MIB  # and 5 of slots; the step needs 48, and 31 stay free
    for _ in range(DECODE_STEPS):
        room.make(step_of(Phase.DECODE, 1))
    assert tier.table.num_slots == 12
    free.free = 1000 * MIB
    for _ in range(DECODE_STEPS):
        room.make(step_of(Phase.DECODE, 1))
    assert tier.table.num_slots == NUM_SLOTS


@on_linux
def test_the_first_decode_step_after_a_prompt_takes_them_again():
    room, tier = make_room(25 * MIB)
    free: Any = room.memory
    for num_decoded in (3, 1):  # short answers
        room.make(step_of(Phase.PREFILL, 10))
        assert tier.table.num_slots < NUM_SLOTS
        free.free = 1000 * MIB
        room.make(step_of(Phase.DECODE, 1))
        assert tier.table.num_slots == NUM_SLOTS
        for _ in range(num_decoded - 1):
            room.make(step_of(Phase.DECODE, 1))
        free.free = 25 * MIB


@on_linux
def test_the_first_decode_step_leaves_room_for_a_copy_of_keys_and_values():
    """Half as much as these take: copies are larger, and those of a layer are there twice. Later
    steps copy nothing.
    """
    room, tier = make_room(25 * MIB)
    room.make(step_of(Phase.PREFILL, 10))
    assert tier.table.num_slots == 11
    free: Any = room.memory
    free.free = 102 * MIB  # and 5 of slots; 48 for the step, 25 to copy, 31 stay free
    step = replace(step_of(Phase.DECODE, 1), context=50)
    room.make(step)
    assert tier.table.num_slots == 13
    for _ in range(DECODE_STEPS):
        room.make(step)
    assert tier.table.num_slots == NUM_SLOTS


@on_linux
def test_slots_give_way_only_while_nobody_else_decides_about_them(tiny_checkpoint):
    """The preloader takes free slots in a thread of its own."""
    with MoE(tiny_checkpoint, host_memory="100%", preload="off") as moe:
        table = moe.engine.tiers[-1].table
        with moe.engine.deciding:
            thread = Thread(target=moe.engine.room.keep_free, args=(1 << 60,))
            thread.start()
            thread.join(0.2)
            assert table.num_withdrawn == 0
        thread.join(20)
        assert table.num_withdrawn > 0
        moe.check_invariants()


@on_linux
def test_the_memory_of_a_slot_that_is_given_back_is_free_and_zero():
    slots = HostSlots(4, 64 * MIB)
    for slot_id in range(4):
        np.asarray(slots.bytes_of(slot_id))[:] = slot_id + 1
    before = own_bytes()
    slots.give_back([1, 3])
    assert before - own_bytes() > 120 * MIB
    firsts = [np.asarray(slots.bytes_of(slot_id))[[0, -1]].tolist() for slot_id in range(4)]
    assert firsts == [[1, 1], [0, 0], [3, 3], [0, 0]]


def test_a_prompt_is_read_in_as_few_passes_as_memory_allows():
    room, _ = make_room(3200 * MIB)
    assert room.tokens_at_once(1000, 1000, 1000) == 1000
    room, _ = make_room((1000 + 2 * 500) * MIB)
    assert room.tokens_at_once(1000, 1000, 1000) == 500
    assert room.tokens_at_once(1000, 1000, 400) == 334, "three equal passes"


@on_linux
def test_slots_give_way_to_fewer_passes_only_where_that_reads_less():
    """A pass reads the 16 experts that are absent; each slot less is one more."""
    room, _ = make_room((100 + 195) * MIB)
    assert room.tokens_at_once(100, 100, 100) == 100, "5 slots less: 21 and 5 later, not 2 * 16"
    room, _ = make_room((100 + 188) * MIB)
    assert room.tokens_at_once(100, 100, 100) == 50, "12 slots less: 28 and 12 later, not 2 * 16"


@pytest.fixture
def blocks(monkeypatch):
    """Of 10 tokens, or another number, 2 MiB each. A layer has 8 experts."""
    monkeypatch.setattr(room_module, "BLOCK_SIZES", (10, 5, 20))
    return SimpleNamespace(size=None, most=None, are_usable=lambda: True)


def test_a_prompt_that_layers_take_in_blocks_is_one_pass(blocks):
    room, _ = make_room((100 + 20) * MIB, num_layers=4, blocks=blocks)
    assert room.tokens_at_once(100, 100, 100) == 100
    room.make(step_of(Phase.PREFILL, 100))
    assert blocks.size == 10
    room.make(step_of(Phase.PREFILL, 10))
    assert blocks.size is None
    assert room.tokens_at_once(100, 100, 100, is_one_sequence=False) < 100


@on_linux
@pytest.mark.parametrize(("free", "size"), [(20, 10), (13, 10), (10, 5), (3, 5)])
def test_blocks_are_so_large_that_the_experts_of_a_layer_have_room_beside_them(free, size, blocks):
    room, tier = make_room((100 + free) * MIB, num_layers=4, blocks=blocks)
    room.make(step_of(Phase.PREFILL, 100))
    assert blocks.size == size
    assert tier.table.num_slots == NUM_SLOTS - max(2 * size - free, 0)


def test_blocks_that_read_least_are_taken_where_no_layer_has_room(blocks):
    """Of 10 tokens 10, each but the first of which reads 4 times 7 again; of 20 tokens 5."""
    room, _ = make_room(140 * MIB, num_slots=1, num_layers=4, blocks=blocks)
    room.make(step_of(Phase.PREFILL, 100))
    assert blocks.size == 20


@on_linux
def test_slots_come_back_for_blocks(blocks):
    room, tier = make_room(200 * MIB, num_layers=4, blocks=blocks)
    tier.table.withdraw(14)
    room.make(step_of(Phase.PREFILL, 10))
    assert tier.table.num_slots == 2, "a decode step takes them"
    room.make(step_of(Phase.PREFILL, 100))
    assert tier.table.num_slots == NUM_SLOTS
    assert blocks.size == 10


def test_not_even_a_short_pass_fits():
    room, _ = make_room(-20 * MIB)
    assert room.tokens_at_once(100, 100, 100) == 0
    assert not room.has_room(1)


def test_the_longest_sequence_is_the_longest_that_has_room():
    room, _ = make_room(500 * MIB)
    longest = room.most_tokens(10**6, is_whole=False)
    assert room.has_room(longest)
    assert not room.has_room(longest + 1)
    assert room.most_tokens(7, is_whole=False) == 7
    whole = room.most_tokens(10**6, is_whole=True)
    assert whole < longest
    assert room.has_room(whole, whole)


def test_a_number_above_the_machine_is_refused():
    with pytest.raises(ConfigError, match="memory of .* is more than this machine has"):
        ProcessMemory(machine_memory_bytes() + 1)


def test_without_a_number_it_is_what_is_there_and_free_but_for_a_margin(monkeypatch):
    monkeypatch.setattr(room_module, "available_memory_bytes", lambda: 500 * MIB)
    monkeypatch.setattr(room_module, "own_bytes", lambda: 100 * MIB)
    margin = margin_of(machine_memory_bytes())
    memory = ProcessMemory(None)
    assert memory.num_bytes == 600 * MIB - margin
    assert memory.left() == 500 * MIB - margin
    monkeypatch.setattr(room_module, "available_memory_bytes", lambda: 50 * MIB)
    assert memory.left() == 50 * MIB - margin, "another program took it"
    monkeypatch.setattr(room_module, "available_memory_bytes", lambda: 5000 * MIB)
    assert ProcessMemory(150 * MIB).left() == 50 * MIB


def test_a_margin_is_a_share_but_not_too_little():
    assert margin_of(64 << 30) == 2 << 30
    assert margin_of(1 << 30) == 128 * MIB


def test_pairs_count_only_where_attention_makes_something_of_them():
    needs = replace(NEEDS, per_pair=10)
    assert needs.of_pass(100, 100) == 100 * 2 * MIB
    assert needs.of_pass(100, 300) == 100 * 2 * MIB + 10 * 100 * 300
    assert replace(needs, is_causal=False).of_pass(100, 100) == 100 * 2 * MIB + 10 * 100 * 100


def test_what_is_unpacked_while_a_layer_attends_counts_for_each_token_that_is_seen():
    needs = replace(NEEDS, per_context=10)
    assert needs.of_pass(100, 100) == 100 * 2 * MIB + 10 * 100
    assert needs.of_pass(1, 300) == 2 * MIB + 10 * 300


def test_a_pass_behind_a_known_prefix_repeats_its_keys_and_values_and_a_decode_step_does_not():
    needs = replace(NEEDS, per_earlier=10)
    assert needs.of_pass(100, 100) == 100 * 2 * MIB
    assert needs.of_pass(100, 300) == 100 * 2 * MIB + 10 * 200
    assert needs.of_pass(100, 0) == 100 * 2 * MIB  # not known
    assert needs.of_decode_step(1, 300) == 2 * MIB


class Config(SimpleNamespace):
    def get_text_config(self, decoder: bool = False) -> Config:
        return self


def test_windows_keep_no_more_than_their_tokens_and_latents_are_shared():
    base: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 4}
    kv = kv_bytes_of(Config(**base, num_key_value_heads=2))
    assert kv.per_token == 4 * 2 * 2 * 8 * 2
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    kv = kv_bytes_of(
        Config(**base, num_key_value_heads=2, layer_types=kinds, sliding_window=10), item_bytes=4
    )
    assert (kv.per_token, kv.per_window_token, kv.window) == (128, 384, 10)
    chunked = Config(**base, layer_types=["chunked_attention"] * 4, attention_chunk_size=10)
    assert kv_bytes_of(chunked).of(1000) == 10 * 4 * 2 * 64 * 2
    windows = Config(**base, sliding_window=10)
    assert kv_bytes_of(windows) == kv_bytes_of(chunked), "all layers, if the config names no types"
    latents: dict[str, Any] = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    kv = kv_bytes_of(Config(**base, **latents, v_head_dim=8))
    assert kv.per_token == 4 * 20 * 2


def test_packed_rows_have_a_byte_for_each_number_and_a_scale():
    base: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 8, "num_hidden_layers": 4}
    kv = kv_bytes_of(Config(**base, num_key_value_heads=2), 2, "int8")
    assert (kv.per_token, kv.dtype) == (4 * 2 * 2 * (8 + 4), "int8")
    latents: dict[str, Any] = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    kv = kv_bytes_of(Config(**base, **latents, v_head_dim=8), 2, "fp8")
    assert kv.per_token == 4 * (16 + 4 + 4 + 4), "a latent and what is rotated"


def test_what_computes_on_a_gpu_is_not_bounded_by_memory_here():
    room, tier = make_room(-100 * MIB)
    room.needs = None
    room.make(step_of(Phase.PREFILL, 10))
    room.make_for_layer(10)
    assert tier.table.num_slots == NUM_SLOTS
    assert room.has_room(10**9)
    assert room.has_all, "passes are as short as where no expert is absent"
    assert room.tokens_at_once(1000, 1000, 512) == 512
    assert room.most_tokens(10**5, is_whole=True) == 10**5
