"""Budgets are those that the engine would choose, and what does not fit is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_infinity.errors import ConfigError
from moe_infinity.memory import slots
from moe_infinity.system import machine as system_machine
from moe_infinity.tools.planning import rates
from moe_infinity.tools.planning.fit import fit


def test_experts_get_seventy_percent_of_what_dense_weights_leave(sizes, machine):
    found = fit(sizes, machine, context=1000)
    assert found.host.num_slots == 280  # 0.7 of 4 GB in slots of 10 MB
    assert found.host.kv == 1000 * 1000 + 128 * 500
    assert found.host_memory is None
    assert found.refusal is None
    assert not found.all_in_memory


def test_the_engine_chooses_the_same_budget(sizes, machine, monkeypatch):
    left = int(machine.ram - machine.runtime - sizes.dense_bytes)
    monkeypatch.setattr(slots, "available_memory_bytes", lambda: left)
    num_slots = slots.num_host_slots(None, slot_bytes=sizes.slot_bytes, num_experts=1000)
    assert fit(sizes, machine, context=0).host.num_slots == num_slots


def test_all_experts_in_memory_need_no_more_slots_than_experts(sizes, large_machine):
    found = fit(sizes, large_machine, context=1000)
    assert found.host.num_slots == 1000
    assert found.all_in_memory


def test_a_context_that_the_default_budget_has_no_room_for_lowers_it(sizes, machine):
    found = fit(sizes, machine, context=3_000_000)  # 3 GB of keys and values
    assert found.host.num_slots == 99  # of 1 GB less a window
    assert found.host_memory == 5 * 10**9 - 10**9 - sizes.kv.of(3_000_000)
    assert found.refusal is None


def test_a_model_whose_dense_weights_do_not_fit_is_refused(sizes, machine):
    found = fit(sizes, replace(machine, ram=1.2e9), context=1000)
    assert found.refusal is not None
    assert found.refusal.startswith("dense weights, KV cache")


def test_a_budget_that_leaves_no_room_for_the_context_is_refused(sizes, machine):
    found = fit(sizes, machine, context=1_000_000, host_memory="4GB")
    assert (
        found.refusal == "memory lacks 953.7 MiB for experts, dense weights and KV cache together"
    )


@pytest.mark.parametrize(("given", "said"), [("9GB", "more than is free"), ("1MB", "no expert")])
def test_a_budget_that_the_engine_refuses_does_not_fit(sizes, machine, given, said):
    refusal = fit(sizes, machine, context=1000, host_memory=given).refusal
    assert refusal is not None
    assert said in refusal


def test_a_budget_that_is_no_size_is_an_error(sizes, machine):
    with pytest.raises(ConfigError, match="'lots' is not a size"):
        fit(sizes, machine, context=1000, host_memory="lots")


def test_a_gpu_takes_dense_weights_and_keys_and_host_memory_all_else(sizes, machine):
    found = fit(sizes, replace(machine, gpu=6e9), context=1000)
    assert found.gpu is not None
    assert (found.gpu.dense, found.gpu.kv) == (sizes.dense_bytes, sizes.kv.of(1000))
    assert found.gpu.num_slots == 400  # 0.8 of 5 GB
    assert (found.host.dense, found.host.kv, found.host.num_slots) == (0, 0, 350)


def test_a_gpu_too_small_for_the_dense_weights_is_refused(sizes, machine):
    found = fit(sizes, replace(machine, gpu=0.5e9), context=1000)
    assert found.refusal is not None
    assert "the GPU has" in found.refusal


def test_memory_is_what_a_new_process_may_have(monkeypatch):
    monkeypatch.setattr(rates, "available_memory_bytes", lambda: 7)
    monkeypatch.setattr(rates, "own_bytes", lambda: 3)
    found = rates.this_machine({"disk": lambda: 5.0}, None)
    assert (found.ram, found.runtime) == (10, 3)
    assert (found.disk, sorted(found.assumed)) == (5.0, ["memory", "new_memory", "products"])
    assert system_machine.available_memory_bytes() > 0
