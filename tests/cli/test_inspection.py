"""Inspection reads headers: gigabytes are described at the price of their table of contents."""

from __future__ import annotations

import json

from moe_infinity import MoE
from moe_infinity.checkpoint.headers import read_headers
from moe_infinity.cli.inspection import inspect_checkpoint

MIB = 1 << 20


def test_inspection_does_not_touch_the_bytes_of_weights(hollow_checkpoint, bytes_read_by_kernel):
    header_bytes = read_headers([hollow_checkpoint / "model.safetensors"]).num_bytes
    inspect_checkpoint(str(hollow_checkpoint))  # imports its architecture
    before = bytes_read_by_kernel()
    summary = inspect_checkpoint(str(hollow_checkpoint))
    assert bytes_read_by_kernel() - before < 3 * header_bytes + MIB // 4
    assert summary.header_bytes == header_bytes


def test_bytes_per_expert_and_budgets_follow_from_the_shapes(hollow_checkpoint):
    summary = inspect_checkpoint(str(hollow_checkpoint))
    assert (summary.moe_layers, summary.experts_per_layer, summary.top_k) == (2, 16, 2)
    assert summary.bytes_per_expert == summary.stored_bytes_per_expert == 12 * MIB
    assert summary.expert_bytes == 32 * 12 * MIB
    held = {budget.host_memory: (budget.experts, budget.num_bytes) for budget in summary.budgets}
    assert held["5%"] == (1, 12 * MIB)  # 1.6 experts are one
    assert held["25%"] == (8, 8 * 12 * MIB)
    assert held["100%"] == (32, 32 * 12 * MIB)


def test_a_dtype_to_compute_in_changes_slots_but_not_what_is_stored(hollow_checkpoint):
    summary = inspect_checkpoint(str(hollow_checkpoint), dtype="float32")
    assert (summary.bytes_per_expert, summary.stored_bytes_per_expert) == (24 * MIB, 12 * MIB)
    assert not summary.is_byte_copy


def test_a_config_that_names_no_dtype_is_inspected_as_it_is_loaded(copy_of, tiny_checkpoint):
    """transformers then takes the dtype of the stored weights."""
    folder = copy_of(tiny_checkpoint)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    with MoE(folder, host_memory="100%") as moe:
        host = moe.report().as_dict()["tiers"]["host"]
    assert inspect_checkpoint(str(folder)).budgets[-1].num_bytes == host["capacity_bytes"]
