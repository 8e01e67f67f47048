"""How many operations the host launches for an MoE layer, whatever the number of its experts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from moe_infinity.engine import compute
from moe_infinity.experimental.gpu import slot_kernels
from moe_infinity.experimental.gpu.slot_kernels import SlotKernels, SlotWork
from moe_infinity.memory.device_mover import COPIED_GROUPS
from moe_infinity.routing import Routing
from tests.experimental.gpu.fast_device import on_device
from tests.experimental.gpu.on_device import PROMPT


class Launches:
    """In place of a kernel."""

    def __init__(self, name: str, counter: Counter[str]) -> None:
        self._name = name
        self._counter = counter

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            tile = f" {options['TILE']}" if "TILE" in options else ""
            self._counter.update([self._name + tile])

        return launch


@pytest.mark.triton
@pytest.mark.parametrize("num_experts", [8, 256])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 16, 32, 2048])
def test_a_layer_takes_as_many_kernels_for_any_number_of_tokens_and_experts(
    monkeypatch, num_tokens, num_experts
):
    pytest.importorskip("triton", reason="needs triton")
    from moe_infinity.experimental.gpu import resolve
    from moe_infinity.experimental.gpu.kernels import experts, tiles
    from tests.experimental.gpu.kernels.test_triton_experts import Experts

    counter: Counter[str] = Counter()
    kernels = {experts: ("_up", "_down", "_sum"), tiles: ("_plan", "_up_tile", "_down_tile")}
    for module, names in kernels.items():
        for name in names:
            monkeypatch.setattr(module, name, Launches(name, counter))
    given = SlotKernels(resolve.resolve, resolve.fill, experts.compute_pairs, experts.sum_pairs)
    x_TD = torch.zeros(num_tokens, 16).bfloat16()
    index_TK = torch.zeros(num_tokens, 8, dtype=torch.int64)
    mlp = Experts("bf16", 16, 16).mlp
    work = SlotWork(given, mlp, x_TD, index_TK, torch.zeros(num_tokens, 8))
    work.compute(torch.zeros(num_experts, dtype=torch.int64))
    work.sum()
    tile = 64 if num_tokens == 2048 else 16
    of_rows = {f"_plan {tile}": 1, f"_up_tile {tile}": 1, f"_down_tile {tile}": 1, "_sum": 1}
    assert counter == ({"_up": 1, "_down": 1, "_sum": 1} if num_tokens == 1 else of_rows)


@torch.no_grad()
@pytest.mark.parametrize("device_memory", ["30%", "100%"])
def test_a_prompt_is_computed_in_a_few_groups_of_experts(
    tiny_checkpoint, monkeypatch, device_memory
):
    """One of those that are there, and some of those that are copied; more only if they do not fit
    together.
    """
    counter: Counter[str] = Counter()
    reference = slot_kernels.slot_kernels(torch.device("cpu"))

    def counting(name: str) -> Any:
        def run(*args: Any) -> Any:
            counter.update([name])
            return getattr(reference, name)(*args)

        return run

    kernels = SlotKernels(*(counting(name) for name in SlotKernels._fields))
    monkeypatch.setattr(compute, "slot_kernels", lambda device: kernels)
    with on_device(tiny_checkpoint, device_memory, "100%") as moe:
        moe.model(torch.arange(3, 103)[None])
        assert counter["sum_pairs"] == 3  # layers
        most = 2 * (1 + COPIED_GROUPS) if device_memory == "30%" else 1 + COPIED_GROUPS
        assert 3 <= counter["compute_pairs"] <= 3 * most
        counter.clear()
        moe.model(torch.arange(3, 103)[None])
        if device_memory == "100%":
            assert counter == {"compute_pairs": 3, "sum_pairs": 3}


@torch.no_grad()
def test_with_a_slot_for_each_expert_a_prompt_waits_for_no_routing(tiny_checkpoint, monkeypatch):
    """It comes to the host later, and is counted as ever."""
    prompt = torch.arange(3, 103)[None]
    with on_device(tiny_checkpoint, "100%", "50%") as moe:
        found = []
        for is_waiting in (True, False):
            if not is_waiting:
                assert moe.engine.tiers[0].table.num_resident == moe.engine.tiers[0].table.num_slots
                monkeypatch.setattr(Routing, "of", lambda *_: pytest.fail("waits for the device"))
            before = moe.report().prefill
            logits = moe.model(prompt).logits
            moe.engine.settle()
            after = moe.report().prefill
            found.append((logits, moe.engine.recorder.routing(), after.lookups - before.lookups))
            assert is_waiting or after.hits - before.hits == after.lookups - before.lookups
    (first, first_routing, *first_count), (second, second_routing, *second_count) = found
    assert torch.equal(first, second)
    assert first_routing is not None
    assert second_routing is not None
    assert np.array_equal(first_routing, second_routing)
    assert first_count == second_count


@torch.no_grad()
def test_routing_that_comes_later_belongs_to_its_step(tiny_checkpoint):
    with on_device(tiny_checkpoint, "100%", "50%") as moe:
        moe.model(torch.arange(3, 103)[None])
        with moe.recording() as finish:
            moe.generate(input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=4)
            traces = finish()
        (eam,) = moe.request_eams()
        assert [trace.experts_TLK.shape[0] for trace in traces] == [PROMPT.shape[1] + 3]
        assert eam.prefill.sum() == PROMPT.shape[1] * traces[0].experts_TLK[0].size
