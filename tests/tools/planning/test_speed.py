"""Times are sums that a reader can do by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_infinity.tools.planning.fit import fit
from moe_infinity.tools.planning.hit_rates import HitRate
from moe_infinity.tools.planning.speed import Constants, activated_share, prompt_operations, speed

ROUND = Constants(
    resident_layer_s=0.001,
    waiting_layer_s=0.002,
    memory_share=1.0,
    load_s=1.0,
    products_share=1.0,
    disk_share=1.0,
    gpu_layer_s=0.0001,
)


def speed_of(sizes, machine, *rates, prompt=10, constants=ROUND):
    fitted = fit(sizes, machine, context=1000)
    hits = tuple(HitRate(rate, "told") for rate in rates)
    return speed(sizes, machine, fitted, hits, prompt=prompt, constants=constants)


def test_a_step_with_all_experts_in_memory_reads_them_and_the_dense_weights(sizes, large_machine):
    found = speed_of(sizes, large_machine, 1.0)
    # 10 layers of 1 ms, 900 MB and 50 experts of 10 MB at 10 GB/s
    assert found.decode.seconds == pytest.approx(0.010 + 0.090 + 0.050)
    assert found.tokens_per_s == pytest.approx(1 / 0.150)


def test_misses_are_read_from_the_disk_beside_what_a_step_computes(sizes, machine):
    found = speed_of(sizes, machine, 0.6)
    # 10 layers of 2 ms, dense weights, 50 experts, 20 misses of 10 MB at 1 GB/s
    assert found.decode.seconds == pytest.approx(0.020 + 0.090 + 0.050 + 0.200)
    few = speed_of(sizes, machine, 0.98)
    assert few.decode.seconds == pytest.approx(0.020 + 0.090 + 0.050 + 0.010)


def test_what_is_packed_on_disk_alone_is_read_at_its_own_size(sizes, machine):
    found = speed_of(replace(sizes, stored_bytes=5 * 10**6), machine, 0.6)
    assert found.decode.seconds == pytest.approx(0.020 + 0.090 + 0.050 + 0.100)


def test_a_cold_prompt_loads_the_model_and_reads_all_experts_that_it_activates(sizes, machine):
    found = speed_of(sizes, machine, 0.6)
    share = 1 - 0.95**10  # of 100 experts a token uses 5
    assert activated_share(sizes, 10) == pytest.approx(share)
    read_s = share * 1000 * 10e6 / 1e9  # longer than the products
    num_slots = fit(sizes, machine, context=10).host.num_slots
    assert num_slots < 401, "as many experts are activated"
    slots_s = num_slots * 10e6 / 2e9
    assert found.first_token_cold.seconds == pytest.approx(1.0 + 1.0 + slots_s + read_s)
    in_memory = num_slots / 1000
    assert found.first_token_warm.seconds == pytest.approx(read_s * (1 - in_memory))


def test_a_cold_prompt_takes_new_memory_only_for_the_experts_that_it_activates(
    sizes, large_machine
):
    (memory,) = (
        term
        for term in speed_of(sizes, large_machine, 1.0).first_token_cold.after_each_other
        if term.what == "new memory for experts"
    )
    assert memory.amount == pytest.approx(activated_share(sizes, 10) * 1000 * 10e6)


def test_loads_reach_a_share_of_the_rate_of_the_disk(sizes, machine):
    whole = speed_of(sizes, machine, 0.6)
    half = speed_of(sizes, machine, 0.6, constants=replace(ROUND, disk_share=0.5))
    assert half.decode.seconds == pytest.approx(whole.decode.seconds + 0.200)
    prompt_s = whole.first_token_warm.seconds
    assert half.first_token_warm.seconds == pytest.approx(2 * prompt_s)


def test_a_long_prompt_with_everything_in_memory_takes_its_products(sizes, large_machine):
    found = speed_of(sizes, large_machine, 1.0, prompt=1000)
    # 400 M dense parameters and 50 experts of 5 M for each token, 50 M once
    operations = 2 * (1000 * (400e6 + 250e6) + 50e6)
    assert prompt_operations(sizes, 1000) == operations
    read_s = (900e6 + activated_share(sizes, 1000) * 10e9) / 10e9
    assert found.first_token_warm.seconds == pytest.approx(operations / 100e9 + read_s)


def test_with_a_gpu_misses_cross_the_link_and_those_of_host_memory_come_from_the_disk(
    sizes, machine
):
    found = speed_of(sizes, replace(machine, gpu=6e9), 0.5, 0.9)
    # 0.1 ms a layer, 900 MB at 400 GB/s; of 25 copies 12.5 ms, 5 reads of 50 ms
    assert found.decode.seconds == pytest.approx(0.001 + 0.00225 + 0.050)
    whole = speed_of(sizes, replace(machine, gpu=6e9), 0.5, 1.0)
    assert whole.decode.seconds == pytest.approx(0.001 + 0.00225 + 0.0125)


def test_an_expert_on_the_gpu_is_never_read_from_the_disk(sizes, machine):
    found = speed_of(sizes, replace(machine, gpu=6e9), 0.9, 0.1)
    assert found.decode.seconds == pytest.approx(0.001 + 0.00225 + 0.050)
