"""HOST slots and the rules of their budget."""

from __future__ import annotations

import pytest
import torch

from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertLayout
from moe_infinity.memory.slots import HostSlots, num_host_slots
from moe_infinity.sizes import format_bytes
from moe_infinity.system.machine import machine_memory_bytes

MIB = 1 << 20
LAYOUT = ExpertLayout.of({"up": ((3, 5), "bfloat16"), "down": ((5, 3), "float32")})
OTHER = ExpertLayout.of({"up": ((2,), "float32")})


def slots_for(
    host_memory: int | str | None,
    *,
    slot_bytes: int = MIB,
    num_experts: int = 100,
    free_bytes: int = 1 << 40,
) -> int:
    return num_host_slots(
        host_memory, slot_bytes=slot_bytes, num_experts=num_experts, free_bytes=free_bytes
    )


@pytest.mark.parametrize(
    ("host_memory", "slots"),
    [(MIB, 1), (2 * MIB - 1, 1), (10 * MIB, 10), ("10MiB", 10), ("25%", 25), ("0.01GiB", 10)],
)
def test_a_budget_is_the_number_of_whole_experts_it_holds(host_memory, slots):
    assert slots_for(host_memory) == slots


@pytest.mark.parametrize("host_memory", ["100%", "100MiB", "101MiB", "150%", 2000 * MIB])
def test_no_more_slots_than_experts_are_made(host_memory):
    assert slots_for(host_memory) == 100


@pytest.mark.parametrize("host_memory", [0, 1, MIB - 1, "0.5MiB", "0%", "0.9%"])
def test_a_budget_below_one_expert_is_refused_with_what_one_takes(host_memory):
    with pytest.raises(ConfigError, match=r"1\.0 MiB"):
        slots_for(host_memory)


@pytest.mark.parametrize("host_memory", [1 << 60, "1000TiB"])
def test_a_budget_above_the_machine_is_refused_even_where_all_experts_would_fit(host_memory):
    with pytest.raises(ConfigError, match="machine") as caught:
        slots_for(host_memory)
    assert format_bytes(machine_memory_bytes()) in str(caught.value)


def test_a_share_of_experts_that_exceeds_the_machine_is_refused():
    with pytest.raises(ConfigError, match="machine"):
        slots_for("100%", slot_bytes=1 << 40)


@pytest.mark.parametrize(("free", "num"), [(20, 20), (99, 99), (100, 100), (1000, 100)])
def test_without_a_budget_experts_take_what_is_left_for_them(free, num):
    """Of 100 experts, 1 MiB each."""
    assert slots_for(None, free_bytes=free * MIB) == num


@pytest.mark.parametrize("free_bytes", [0, -MIB])
def test_without_a_budget_and_without_free_memory_is_a_clear_error(free_bytes):
    with pytest.raises(ConfigError, match="hint: raise memory"):
        slots_for(None, free_bytes=free_bytes)


def test_what_is_written_as_bytes_is_read_as_parameters():
    slots = HostSlots(3, LAYOUT.slot_bytes)
    expert = {"up": torch.randn(3, 5).bfloat16(), "down": torch.randn(5, 3)}
    for spec in LAYOUT.params:
        raw = expert[spec.name].view(torch.uint8).numpy().tobytes()
        slots.bytes_of(1)[spec.offset : spec.offset + spec.num_bytes] = raw
    views = slots.views(LAYOUT)[1]
    assert all(torch.equal(views[name], value) for name, value in expert.items())


def test_slots_do_not_overlap():
    slots = HostSlots(3, LAYOUT.slot_bytes)
    for slot_id in range(3):
        slots.bytes_of(slot_id)[:] = bytes([slot_id]) * LAYOUT.slot_bytes
    assert [set(slots.bytes_of(slot_id)) for slot_id in range(3)] == [{0}, {1}, {2}]


def test_layers_of_different_layout_share_the_slots():
    slots = HostSlots(2, max(LAYOUT.slot_bytes, OTHER.slot_bytes))
    slots.bytes_of(1)[:8] = torch.tensor([1.5, -2.0]).view(torch.uint8).numpy().tobytes()
    assert slots.views(OTHER)[1]["up"].tolist() == [1.5, -2.0]
    assert slots.views(LAYOUT)[1]["up"].shape == (3, 5)


def test_parameters_start_at_cache_lines_and_fit_their_slot():
    for layout in (LAYOUT, OTHER):
        assert all(spec.offset % 64 == 0 for spec in layout.params)
        ends = [spec.offset + spec.num_bytes for spec in layout.params]
        assert all(end <= spec.offset for end, spec in zip(ends, layout.params[1:], strict=False))
        assert ends[-1] <= layout.slot_bytes


def test_an_allocation_the_machine_cannot_make_is_a_clear_error():
    with pytest.raises(ConfigError, match="host_memory"):
        HostSlots(1 << 20, 1 << 42)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (8 << 30, "8.0 GiB"), (3 << 40, "3.0 TiB")],
)
def test_bytes_are_shown_in_binary_units(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_experts_in_their_files_take_the_bytes_that_they_have_there():
    """Not those of the widest layer, by which slots are made."""

    def num(host_memory: str | None) -> int:
        return num_host_slots(
            host_memory,
            slot_bytes=2 * MIB,
            num_experts=100,
            free_bytes=100 * MIB,
            mapped_bytes=84 * MIB,
        )

    assert (num(None), num("84MiB"), num("100%")) == (100, 100, 100)
    assert num("83MiB") == 41
