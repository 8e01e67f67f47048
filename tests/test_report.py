"""What a model says it did: the EAMs of the last request, and the report since it was loaded. Both
are compared with what the routers of stock transformers choose, so its bits are those of stock."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from moe_infinity import MoE
from moe_infinity.checkpoint.headers import read_headers
from tests.disk import Disk, Read
from tests.on_demand import ON_DEMAND

pytestmark = [pytest.mark.timeout(30), pytest.mark.arithmetic]
NUM_ROWS, NUM_EXPERTS, TOP_K = 3, 8, 2
BYTES_PER_EXPERT = 3 * 32 * 16 * 2


@pytest.fixture
def moe(tiny_checkpoint):
    with MoE(tiny_checkpoint, host_memory="25%", exact=True) as moe:
        yield moe
        moe.check_invariants()


@pytest.fixture
def stock(stock_model) -> Callable[..., list[list[int]]]:
    """stock(inputs, ...) -> what stock transformers generates."""

    def generate(inputs: Any, **kwargs: Any) -> list[list[int]]:
        ids: list[list[int]] = stock_model.generate(**inputs, do_sample=False, **kwargs).tolist()
        return ids

    return generate


def tokens_of(moe: MoE, inputs: Any, **kwargs: Any) -> list[list[int]]:
    ids: list[list[int]] = moe.generate(**inputs, do_sample=False, **kwargs).tolist()
    return ids


def encode(*token_ids: int) -> BatchEncoding:
    return BatchEncoding(
        {
            "input_ids": torch.tensor([token_ids]),
            "attention_mask": torch.ones(1, len(token_ids), dtype=torch.long),
        }
    )


def padded_batch(moe: MoE) -> BatchEncoding:
    """Three sequences of 2, 5 and 3 tokens, padded on the left."""
    texts = ["w5 w6", "w7 w8 w9 w10 w11", "w3 w4 w5"]
    return moe.tokenizer(texts, return_tensors="pt", padding=True)


# request_eams


def counted(routing: Any, keep: np.ndarray | None = None) -> np.ndarray:
    """[layers, experts]: how many of the kept tokens of one step each expert served."""
    layers = [ids if keep is None else ids[keep] for ids in routing]
    return np.stack([np.bincount(ids.ravel(), minlength=NUM_EXPERTS) for ids in layers])


def test_request_eams_count_prompt_and_output_apart(moe, stock, stock_routing):
    inputs = encode(5, 6, 9, 100, 31)
    tokens_of(moe, inputs, max_new_tokens=12, min_new_tokens=12)
    stock(inputs, max_new_tokens=12, min_new_tokens=12)
    (eam,) = moe.request_eams()
    assert eam.prefill.shape == eam.decode.shape == (NUM_ROWS, NUM_EXPERTS)
    assert eam.prefill.sum(axis=1).tolist() == [5 * TOP_K] * NUM_ROWS
    assert eam.decode.sum(axis=1).tolist() == [11 * TOP_K] * NUM_ROWS
    assert (eam.prefill == counted(stock_routing[0])).all()
    assert (eam.decode == sum(counted(step) for step in stock_routing[1:])).all()


def test_request_eams_are_of_the_last_request_only(moe):
    tokens_of(moe, encode(5, 6, 9, 10), max_new_tokens=6)
    tokens_of(moe, encode(40, 41), max_new_tokens=3)
    (eam,) = moe.request_eams()
    assert eam.prefill.sum(axis=1).tolist() == [2 * TOP_K] * NUM_ROWS
    assert eam.decode.sum(axis=1).tolist() == [2 * TOP_K] * NUM_ROWS


def test_request_eams_of_a_batch_leave_padding_out(moe, stock, stock_routing):
    batch = padded_batch(moe)
    tokens_of(moe, batch, max_new_tokens=6, min_new_tokens=6)
    stock(batch, max_new_tokens=6, min_new_tokens=6)
    eams = moe.request_eams()
    is_token = batch["attention_mask"].bool().numpy()
    for idx, (eam, length) in enumerate(zip(eams, (2, 5, 3), strict=True)):
        keep = np.zeros_like(is_token)
        keep[idx] = is_token[idx]
        assert eam.prefill.sum(axis=1).tolist() == [length * TOP_K] * NUM_ROWS
        assert eam.decode.sum(axis=1).tolist() == [5 * TOP_K] * NUM_ROWS
        assert (eam.prefill == counted(stock_routing[0], keep.ravel())).all()


def set_in_generation_config(folder: Path, **values: Any) -> Path:
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    return folder


@pytest.mark.parametrize("given", ["to generate", "to the loaded model", "by the checkpoint"])
def test_request_eams_of_a_finished_sequence_stop_counting(tiny_checkpoint, copy_of, stock, given):
    """Two sequences, one of which ends at its first token and is fed padding from there on."""
    batch = BatchEncoding({"input_ids": torch.tensor([[5, 6], [7, 8]])})
    outputs = [ids[2:] for ids in stock(batch, max_new_tokens=9, min_new_tokens=9)]
    end_id = next(token_id for token_id in outputs[0] if token_id not in outputs[1])
    lengths = [outputs[0].index(end_id) + 1, 9]
    end = {"eos_token_id": end_id, "pad_token_id": end_id}
    by_checkpoint = end if given == "by the checkpoint" else {}
    folder = set_in_generation_config(copy_of(tiny_checkpoint), **by_checkpoint)
    with MoE(folder, host_memory="25%", exact=True) as moe:
        if given == "to the loaded model":
            moe.model.generation_config.update(**end)
        tokens_of(moe, batch, max_new_tokens=9, **(end if given == "to generate" else {}))
        decoded = [eam.decode.sum(axis=1).tolist() for eam in moe.request_eams()]
    assert decoded == [[(length - 1) * TOP_K] * NUM_ROWS for length in lengths]


def test_a_running_sequence_may_write_the_padding_token_and_is_still_counted(
    tiny_checkpoint, copy_of, stock
):
    """Without an end of sequence every token counts, whatever its id."""
    batch = BatchEncoding({"input_ids": torch.tensor([[5, 6], [7, 8]])})
    written = stock(batch, max_new_tokens=9, min_new_tokens=9)[0][4]
    folder = copy_of(tiny_checkpoint)
    set_in_generation_config(folder, eos_token_id=None, pad_token_id=written)
    with MoE(folder, host_memory="25%", exact=True) as moe:
        moe.generate(**batch, attention_mask=torch.ones(2, 2), do_sample=False, max_new_tokens=9)
        sums = [eam.decode.sum(axis=1).tolist() for eam in moe.request_eams()]
    assert sums == [[8 * TOP_K] * NUM_ROWS] * 2


def test_request_eams_are_the_callers_own(moe):
    tokens_of(moe, encode(5, 6), max_new_tokens=2)
    moe.request_eams()[0].prefill[:] = -1
    assert (moe.request_eams()[0].prefill >= 0).all()


# report


@pytest.mark.parametrize("host_memory", [BYTES_PER_EXPERT, "25%", "100%"])
def test_the_report_counts_one_lookup_per_activated_expert_layer_and_step(
    tiny_checkpoint, stock, stock_routing, host_memory
):
    inputs = encode(5, 6, 9, 100, 31)
    stock(inputs, max_new_tokens=12)
    expected = [sum(len(np.unique(ids)) for ids in step) for step in stock_routing]
    with MoE(tiny_checkpoint, host_memory=host_memory, exact=True, **ON_DEMAND) as moe:
        tokens_of(moe, inputs, max_new_tokens=12)
        report = moe.report()
    assert (report.prefill.steps, report.decode.steps) == (1, len(expected) - 1)
    assert (report.prefill.tokens, report.decode.tokens) == (5, len(expected) - 1)
    for phase, lookups in ((report.prefill, expected[0]), (report.decode, sum(expected[1:]))):
        assert phase.hits + phase.late_hits + phase.misses == lookups
        assert phase.hit_rate == phase.hits / lookups
        assert phase.bytes_read == phase.misses * BYTES_PER_EXPERT
        assert phase.stall_s >= 0
    assert report.bytes_read == report.prefill.bytes_read + report.decode.bytes_read
    assert report.stall_s == report.prefill.stall_s + report.decode.stall_s


def test_with_room_for_all_experts_each_is_read_once(tiny_checkpoint, stock_routing, stock):
    inputs = encode(5, 6, 9, 100, 31)
    stock(inputs, max_new_tokens=12)
    used = {
        (layer, expert)
        for step in stock_routing
        for layer, ids in enumerate(step)
        for expert in ids.ravel().tolist()
    }
    with MoE(tiny_checkpoint, host_memory="100%", exact=True, **ON_DEMAND) as moe:
        tokens_of(moe, inputs, max_new_tokens=12)
        tokens_of(moe, inputs, max_new_tokens=12)
        report = moe.report()
    assert report.bytes_read == len(used) * BYTES_PER_EXPERT
    assert report.evictions == 0
    assert report.as_dict()["tiers"]["host"]["experts"] == len(used)


@pytest.mark.parametrize(("host_memory", "slots"), [("5%", 1), ("25%", 6), ("100%", 24)])
def test_the_report_says_how_full_the_tiers_are(tiny_checkpoint, host_memory, slots):
    with MoE(tiny_checkpoint, host_memory=host_memory, **ON_DEMAND) as moe:
        host = {tier.tier: tier for tier in moe.report().tiers}["host"]
        assert (host.experts, host.capacity) == (0, slots)
        assert host.capacity_bytes == slots * BYTES_PER_EXPERT
        tokens_of(moe, encode(5, 6, 9, 100, 31), max_new_tokens=30)
        tiers = {tier.tier: tier for tier in moe.report().tiers}
    assert 0 < tiers["host"].experts <= slots
    assert tiers["disk"].experts == 24


def test_the_report_of_a_fresh_model_has_no_hit_rate_and_no_expert_bytes(tiny_checkpoint):
    with MoE(tiny_checkpoint, **ON_DEMAND) as moe:
        report = moe.report()
    assert report.prefill.hit_rate is None
    assert report.decode.hit_rate is None
    assert report.bytes_read == 0


def test_an_expert_that_is_still_loading_is_not_in_memory(tiny_checkpoint, monkeypatch):
    disk, are_loading, go_on = Disk(monkeypatch), Event(), Event()

    def act(read: Read) -> None:
        if read.kind == "preload":
            are_loading.set()
            assert go_on.wait(20)

    disk.act = act
    with MoE(tiny_checkpoint, host_memory="100%") as moe:
        assert are_loading.wait(20)
        assert moe.report().tiers[0].experts == 0
        go_on.set()
        moe.preload()
        assert moe.report().tiers[0].experts == 24


def test_a_report_is_a_snapshot(moe):
    before = moe.report()
    tokens_of(moe, encode(5, 6), max_new_tokens=4)
    assert before.prefill.steps == 0 < moe.report().prefill.steps


def test_a_report_prints_and_becomes_json(moe):
    tokens_of(moe, encode(5, 6), max_new_tokens=4)
    report = moe.report()
    assert json.loads(json.dumps(report.as_dict()))["decode"]["hit_rate"] == report.decode.hit_rate
    assert f"{report.decode.hit_rate:.1%}" in str(report)


# start-up


def test_start_up_reads_headers_and_dense_weights_only(moe, tiny_checkpoint):
    whole = (tiny_checkpoint / "model.safetensors").stat().st_size
    assert moe.report().startup_bytes_read == whole - 24 * BYTES_PER_EXPERT


def test_start_up_does_not_touch_the_bytes_of_experts(hollow_checkpoint, bytes_read_by_kernel):
    headers = read_headers([hollow_checkpoint / "model.safetensors"])
    dense_bytes = sum(
        t.extent.num_bytes for name, t in headers.tensors.items() if ".experts." not in name
    )
    before = bytes_read_by_kernel()
    with MoE(hollow_checkpoint, host_memory="10%"):
        read = bytes_read_by_kernel() - before
    assert dense_bytes <= read < dense_bytes + 5 * headers.num_bytes + (4 << 20)
