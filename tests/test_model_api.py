"""The API: what `generate` gives in a transformers program, `MoE` gives too, and it can say what it
did."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import BatchEncoding

from moe_infinity import ClosedError, ConfigError, MoE, OffloadConfig
from moe_infinity.memory.checkpoint import read_headers

pytestmark = pytest.mark.timeout(30)
NUM_ROWS, NUM_EXPERTS, TOP_K = 3, 8, 2
BYTES_PER_EXPERT = 3 * 32 * 16 * 2
PROMPT = "w5 w6 w9 w100 w31"


@pytest.fixture
def moe(tiny_checkpoint):
    with MoE(tiny_checkpoint, host_memory="25%") as moe:
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


def threads_generating() -> int:
    return sum(thread.name == "moe-infinity-generate" for thread in threading.enumerate())


# generate


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("host_memory", [BYTES_PER_EXPERT, "25%", "100%"])
def test_generate_gives_the_tokens_of_stock_transformers(
    tiny_checkpoint, stock, policy, host_memory
):
    inputs = encode(5, 6, 9, 100, 31)
    with MoE(tiny_checkpoint, policy=policy, host_memory=host_memory) as moe:
        assert tokens_of(moe, inputs, max_new_tokens=20) == stock(inputs, max_new_tokens=20)


def test_shards_give_the_same_tokens_as_one_file(sharded_checkpoint, stock):
    inputs = encode(5, 6, 9, 100, 31)
    with MoE(sharded_checkpoint, host_memory="25%") as moe:
        assert tokens_of(moe, inputs, max_new_tokens=20) == stock(inputs, max_new_tokens=20)


def test_a_padded_batch_gives_the_tokens_of_stock_transformers(moe, stock):
    batch = padded_batch(moe)
    assert tokens_of(moe, batch, max_new_tokens=12) == stock(batch, max_new_tokens=12)


def test_generate_takes_the_arguments_of_transformers(moe, stock_model):
    settings = {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2}
    settings |= {"output_scores": True, "return_dict_in_generate": True, "do_sample": False}
    inputs = encode(5, 6, 9)
    ours, theirs = moe.generate(**inputs, **settings), stock_model.generate(**inputs, **settings)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(ours.sequences_scores, theirs.sequences_scores)


def test_sampling_with_a_seed_gives_the_tokens_of_stock_transformers(moe, stock_model):
    settings = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.3, "top_p": 0.9}
    found = []
    for model in (moe, stock_model):
        transformers.set_seed(7)
        found.append(model.generate(**encode(5, 6, 9), **settings).tolist())
    assert found[0] == found[1]


def test_the_model_itself_gives_the_logits_of_stock_transformers(moe, stock_model):
    inputs = padded_batch(moe)
    with torch.no_grad():
        assert torch.equal(moe.model(**inputs).logits, stock_model(**inputs).logits)


def test_the_model_is_of_the_class_transformers_would_give(moe, stock_model):
    assert type(moe.model) is type(stock_model)
    assert moe.tokenizer.decode([5, 6]) == "w5 w6"


# stream


def test_a_stream_gives_the_text_and_tokens_of_generate_piece_by_piece(moe):
    expected = tokens_of(moe, moe.tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=16)[0][5:]
    stream = moe.stream(PROMPT, max_new_tokens=16, do_sample=False)
    pieces = [piece for piece in stream if piece]
    assert stream.token_ids == expected
    assert "".join(pieces) == stream.text == moe.tokenizer.decode(expected)
    assert len(pieces) > 8


def test_a_stream_takes_what_the_tokenizer_returned(moe):
    inputs = moe.tokenizer(PROMPT, return_tensors="pt")
    streams = [moe.stream(prompt, max_new_tokens=8, do_sample=False) for prompt in (PROMPT, inputs)]
    texts = ["".join(stream) for stream in streams]
    assert texts[0] == texts[1] != ""
    assert set(inputs) == {"input_ids", "attention_mask"}, "the caller's inputs were changed"


def test_a_stream_measures_time_to_first_token_and_per_token(moe):
    stream = moe.stream(PROMPT, max_new_tokens=16, do_sample=False)
    assert (stream.ttft_s, stream.tpot_s) == (None, None)
    started = time.perf_counter()
    list(stream)
    elapsed = time.perf_counter() - started
    assert stream.ttft_s is not None
    assert stream.tpot_s is not None
    assert 0 < stream.tpot_s < elapsed
    assert 0 < stream.ttft_s < elapsed


def test_a_stream_of_one_token_has_no_time_per_token(moe):
    stream = moe.stream(PROMPT, max_new_tokens=1, do_sample=False)
    list(stream)
    assert len(stream.token_ids) == 1
    assert stream.ttft_s is not None
    assert stream.tpot_s is None


def test_leaving_a_stream_early_stops_generation(moe, stock):
    stream = moe.stream(PROMPT, max_new_tokens=450, min_new_tokens=450, do_sample=False)
    for number, _ in enumerate(stream):
        if number == 3:
            break
    assert len(stream.token_ids) < 400
    assert threads_generating() == 0
    inputs = encode(5, 6, 9)
    assert tokens_of(moe, inputs, max_new_tokens=5) == stock(inputs, max_new_tokens=5)


def test_an_error_inside_generation_is_raised_by_the_stream(moe):
    with pytest.raises(ValueError, match="nonsense_argument"):
        list(moe.stream(PROMPT, max_new_tokens=4, nonsense_argument=1))
    assert threads_generating() == 0


def test_a_stream_refuses_a_batch(moe):
    with pytest.raises(ConfigError, match="one sequence"):
        moe.stream(padded_batch(moe), max_new_tokens=4)


def test_a_stream_keeps_the_stopping_criteria_of_the_caller(moe):
    stream = moe.stream(
        PROMPT, max_new_tokens=50, do_sample=False,
        stopping_criteria=[lambda ids, scores, **kwargs: torch.tensor([ids.shape[1] >= 5 + 3])],
    )  # fmt: skip
    list(stream)
    assert len(stream.token_ids) == 3


# close


def test_close_may_come_twice_and_use_after_it_says_so(tiny_checkpoint):
    moe = MoE(tiny_checkpoint, host_memory="25%")
    moe.close()
    moe.close()
    for use in (
        lambda: moe.generate(**encode(5, 6), max_new_tokens=2),
        lambda: moe.stream("w5", max_new_tokens=2),
        lambda: moe.recording().__enter__(),
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()


def test_a_stream_begun_before_close_and_read_after_it_says_so(tiny_checkpoint):
    with MoE(tiny_checkpoint, host_memory="25%") as moe:
        stream = moe.stream(PROMPT, max_new_tokens=4)
    with pytest.raises(ClosedError):
        list(stream)


def test_the_context_manager_closes_also_after_an_error(tiny_checkpoint):
    with (
        pytest.raises(RuntimeError, match="of the caller"),
        MoE(tiny_checkpoint, host_memory="25%") as moe,
    ):
        raise RuntimeError("of the caller")
    with pytest.raises(ClosedError):
        moe.generate(**encode(5), max_new_tokens=1)


def test_close_leaves_no_thread_and_no_file_behind(sharded_checkpoint):
    before = threading.active_count()
    with MoE(sharded_checkpoint, host_memory="25%") as moe:
        moe.generate(**encode(5, 6), max_new_tokens=3)
    assert threading.active_count() == before
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    files = [str(link.readlink()) for link in links if link.exists()]
    assert not [file for file in files if str(sharded_checkpoint) in file]


def test_two_models_at_once_do_not_disturb_each_other(tiny_checkpoint, sharded_checkpoint, stock):
    inputs = encode(5, 6, 9)
    expected = stock(inputs, max_new_tokens=8)
    with MoE(tiny_checkpoint, host_memory="25%") as one:
        with MoE(sharded_checkpoint, host_memory="50%") as other:
            assert tokens_of(one, inputs, max_new_tokens=8) == expected
            assert tokens_of(other, inputs, max_new_tokens=8) == expected
        assert tokens_of(one, inputs, max_new_tokens=8) == expected


# threads


def test_two_threads_generating_at_once_get_the_right_tokens(moe, stock):
    prompts = [encode(*ids) for ids in ((5, 6, 9), (40, 41), (7, 7, 7, 8), (120,))]
    expected = [stock(prompt, max_new_tokens=10) for prompt in prompts]
    found: dict[int, list[list[int]]] = {}

    def work(numbers: range) -> None:
        for number in numbers:
            found[number] = tokens_of(moe, prompts[number % 4], max_new_tokens=10)

    threads = [threading.Thread(target=work, args=(range(start, 12, 2),)) for start in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [found[number] for number in range(12)] == expected * 3


def test_two_streams_read_in_turns_get_the_right_tokens(moe, stock):
    streams = [moe.stream(text, max_new_tokens=10, do_sample=False) for text in ("w5 w6", "w40")]
    iterators = [iter(stream) for stream in streams]
    while any(list(zip(range(2), iterator, strict=False)) for iterator in iterators):
        pass
    assert streams[0].token_ids == stock(encode(5, 6), max_new_tokens=10)[0][2:]
    assert streams[1].token_ids == stock(encode(40), max_new_tokens=10)[0][1:]


# request_eams


def counted(routing: Any, keep: np.ndarray | None = None) -> np.ndarray:
    """[rows, experts]: how many of the kept tokens of one step each expert served."""
    rows = [row if keep is None else row[keep] for row in routing]
    return np.stack([np.bincount(row.ravel(), minlength=NUM_EXPERTS) for row in rows])


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
    with MoE(folder, host_memory="25%") as moe:
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
    with MoE(folder, host_memory="25%") as moe:
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
    expected = [sum(len(np.unique(row)) for row in step) for step in stock_routing]
    with MoE(tiny_checkpoint, host_memory=host_memory) as moe:
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
        (row, expert)
        for step in stock_routing
        for row, ids in enumerate(step)
        for expert in ids.ravel().tolist()
    }
    with MoE(tiny_checkpoint, host_memory="100%") as moe:
        tokens_of(moe, inputs, max_new_tokens=12)
        tokens_of(moe, inputs, max_new_tokens=12)
        report = moe.report()
    assert report.bytes_read == len(used) * BYTES_PER_EXPERT
    assert report.evictions == 0
    assert report.as_dict()["tiers"]["host"]["experts"] == len(used)


@pytest.mark.parametrize(("host_memory", "slots"), [("5%", 1), ("25%", 6), ("100%", 24)])
def test_the_report_says_how_full_the_tiers_are(tiny_checkpoint, host_memory, slots):
    with MoE(tiny_checkpoint, host_memory=host_memory) as moe:
        host = {tier.tier: tier for tier in moe.report().tiers}["host"]
        assert (host.experts, host.capacity) == (0, slots)
        assert host.capacity_bytes == slots * BYTES_PER_EXPERT
        tokens_of(moe, encode(5, 6, 9, 100, 31), max_new_tokens=30)
        tiers = {tier.tier: tier for tier in moe.report().tiers}
    assert 0 < tiers["host"].experts <= slots
    assert tiers["disk"].experts == 24


def test_the_report_of_a_fresh_model_has_no_hit_rate_and_no_expert_bytes(moe):
    report = moe.report()
    assert report.prefill.hit_rate is None
    assert report.decode.hit_rate is None
    assert report.bytes_read == 0


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


# config


def test_every_documented_way_to_configure_gives_the_same_config(tiny_checkpoint):
    expected = OffloadConfig(policy="lfu", host_memory="25%")
    ways: list[tuple[Any, dict[str, Any]]] = [
        (expected, {}),
        ({"policy": "lfu", "host_memory": "25%"}, {}),
        (None, {"policy": "lfu", "host_memory": "25%"}),
        ({"policy": "lfu"}, {"host_memory": "25%"}),
    ]
    for config, options in ways:
        with MoE(str(tiny_checkpoint), config, **options) as moe:
            assert moe.config == expected
