"""Budgets are those that the engine would choose, and what does not fit is said."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_infinity.errors import ConfigError
from moe_infinity.memory.room import FIXED_SHARE, margin_of
from moe_infinity.system import machine as system_machine
from moe_infinity.tools.planning import rates
from moe_infinity.tools.planning.fit import fit


def test_experts_get_what_the_rest_leaves(sizes, machine):
    found = fit(sizes, machine, context=1000)
    rest = sizes.dense_bytes + machine.runtime + sizes.pass_bytes + sizes.kv.of(1000)
    left = machine.ram - margin_of(int(machine.ram)) - rest
    assert found.host.num_slots == left // 10**7
    assert found.host.kv == 1000 * 1000 + 128 * 500
    assert found.refusal is None
    assert not found.all_in_memory


def test_all_experts_in_memory_need_no_more_slots_than_experts(sizes, large_machine):
    found = fit(sizes, large_machine, context=1000)
    assert found.host.num_slots == 1000
    assert found.all_in_memory


def test_a_long_context_leaves_less_for_experts(sizes, machine):
    short, long = (fit(sizes, machine, context=context) for context in (0, 3_000_000))
    assert short.host.num_slots - long.host.num_slots == pytest.approx(300, abs=1)  # 3 GB
    assert long.refusal is None


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
    left = machine.ram - margin_of(int(machine.ram)) - machine.runtime
    assert (found.host.dense, found.host.kv) == (0, 0)
    assert found.host.num_slots == int(left * FIXED_SHARE) // 10**7


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
