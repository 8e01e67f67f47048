"""The API: what `generate` gives in a transformers program, `MoE` gives too, and it can say what it
did."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BatchEncoding, DynamicCache, GenerationMixin

from moe_infinity import ClosedError, ConfigError, MoE, OffloadConfig
from moe_infinity.architectures.attention_inputs import cache_parameter
from moe_infinity.cli.inspection import inspect_checkpoint
from moe_infinity.long_prompts import in_passes
from moe_infinity.memory.room import Room
from moe_infinity.streaming import TextStream
from tests.small_tokenizers import KINDS

pytestmark = [pytest.mark.timeout(30), pytest.mark.arithmetic]
NUM_ROWS, NUM_EXPERTS, TOP_K = 3, 8, 2
BYTES_PER_EXPERT = 3 * 32 * 16 * 2
PROMPT = "w5 w6 w9 w100 w31"


@pytest.fixture
def moe(tiny_checkpoint):
    with MoE(tiny_checkpoint, host_memory="25%") as moe:
        yield moe
        moe.check_invariants()


@pytest.fixture
def exact(tiny_checkpoint):
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


def threads_generating() -> int:
    return sum(thread.name == "moe-infinity-generate" for thread in threading.enumerate())


# generate


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("host_memory", [BYTES_PER_EXPERT, "25%", "100%"])
def test_generate_gives_the_tokens_of_stock_transformers(
    tiny_checkpoint, stock, policy, host_memory
):
    inputs = encode(5, 6, 9, 100, 31)
    options = {"policy": policy, "host_memory": host_memory, "exact": True}
    with MoE(tiny_checkpoint, **options) as moe:
        assert tokens_of(moe, inputs, max_new_tokens=20) == stock(inputs, max_new_tokens=20)


def test_shards_give_the_same_tokens_as_one_file(sharded_checkpoint, stock):
    inputs = encode(5, 6, 9, 100, 31)
    with MoE(sharded_checkpoint, host_memory="25%", exact=True) as moe:
        assert tokens_of(moe, inputs, max_new_tokens=20) == stock(inputs, max_new_tokens=20)


def test_a_padded_batch_gives_the_tokens_of_stock_transformers(exact, stock):
    batch = padded_batch(exact)
    assert tokens_of(exact, batch, max_new_tokens=12) == stock(batch, max_new_tokens=12)


def test_generate_takes_the_arguments_of_transformers(exact, stock_model):
    settings = {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2}
    settings |= {"output_scores": True, "return_dict_in_generate": True, "do_sample": False}
    inputs = encode(5, 6, 9)
    ours, theirs = (model.generate(**inputs, **settings) for model in (exact, stock_model))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(ours.sequences_scores, theirs.sequences_scores)


def test_sampling_with_a_seed_gives_the_tokens_of_stock_transformers(exact, stock_model):
    settings = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.3, "top_p": 0.9}
    found = []
    for model in (exact, stock_model):
        transformers.set_seed(7)
        found.append(model.generate(**encode(5, 6, 9), **settings).tolist())
    assert found[0] == found[1]


def test_the_model_itself_gives_the_logits_of_stock_transformers(exact, stock_model):
    inputs = padded_batch(exact)
    with torch.no_grad():
        assert torch.equal(exact.model(**inputs).logits, stock_model(**inputs).logits)


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


def test_a_stream_keeps_the_spaces_behind_a_newline():
    """transformers' streamer loses one at each newline where a decoder strips the first space."""
    tokenizer = KINDS["SentencePiece BPE with bytes, Llama"]()
    ids = tokenizer.convert_tokens_to_ids(["▁a", "\n", "▁▁▁", "▁return", "\n", "▁▁▁", "▁b"])

    def generate(cancelled, *, streamer, **rest):
        streamer.put(torch.tensor([[4, 5]]))
        for token_id in ids:
            streamer.put(torch.tensor([token_id]))
        streamer.end()

    pieces = list(TextStream(generate, tokenizer, {}))
    assert "".join(pieces) == tokenizer.decode(ids) == "a\n    return\n    b"
    assert len(pieces) == len(ids)


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


def test_leaving_a_stream_early_stops_generation(moe, resident_model):
    stream = moe.stream(PROMPT, max_new_tokens=450, min_new_tokens=450, do_sample=False)
    for number, _ in enumerate(stream):
        if number == 3:
            break
    assert len(stream.token_ids) < 400
    assert threads_generating() == 0
    inputs = encode(5, 6, 9)
    expected = tokens_of(resident_model, inputs, max_new_tokens=5)
    assert tokens_of(moe, inputs, max_new_tokens=5) == expected


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


@pytest.mark.parametrize(
    "prompt", [7, {}, {"input_ids": [5, 6]}, {"input_ids": [[5, 6]]}, {"input_ids": torch.ones(3)}]
)
def test_a_stream_of_something_else_says_what_it_takes(moe, prompt):
    with pytest.raises(ConfigError, match="return_tensors"):
        moe.stream(prompt)


def test_a_stream_takes_no_stopping_criteria_as_generate_does(moe):
    stream = moe.stream(PROMPT, max_new_tokens=4, stopping_criteria=None)
    assert len(list(stream)) > 0
    assert len(stream.token_ids) == 4


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
    gc.collect()  # of models that other tests dropped
    before = threading.active_count()
    with MoE(sharded_checkpoint, host_memory="25%") as moe:
        moe.generate(**encode(5, 6), max_new_tokens=3)
    assert threading.active_count() == before
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    files = [str(link.readlink()) for link in links if link.exists()]
    assert not [file for file in files if str(sharded_checkpoint) in file]


def test_two_models_at_once_do_not_disturb_each_other(
    tiny_checkpoint, sharded_checkpoint, resident_model
):
    inputs = encode(5, 6, 9)
    expected = tokens_of(resident_model, inputs, max_new_tokens=8)
    with MoE(tiny_checkpoint, host_memory="25%") as one:
        with MoE(sharded_checkpoint, host_memory="50%") as other:
            assert tokens_of(one, inputs, max_new_tokens=8) == expected
            assert tokens_of(other, inputs, max_new_tokens=8) == expected
        assert tokens_of(one, inputs, max_new_tokens=8) == expected


# threads


@pytest.mark.parametrize("is_below", [False, True], ids=["MoE", "its model"])
def test_two_threads_generating_at_once_get_the_right_tokens(moe, resident_model, is_below):
    prompts = [encode(*ids) for ids in ((5, 6, 9), (40, 41), (7, 7, 7, 8), (120,))]
    expected = [tokens_of(resident_model, prompt, max_new_tokens=10) for prompt in prompts]
    found: dict[int, list[list[int]]] = {}
    shared = resident_model.model if is_below else moe

    def work(numbers: range) -> None:
        for number in numbers:
            found[number] = tokens_of(shared, prompts[number % 4], max_new_tokens=10)

    threads = [threading.Thread(target=work, args=(range(start, 8, 2),)) for start in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [found[number] for number in range(8)] == expected * 2


def test_two_streams_read_in_turns_get_the_right_tokens(moe, resident_model):
    streams = [moe.stream(text, max_new_tokens=10, do_sample=False) for text in ("w5 w6", "w40")]
    iterators = [iter(stream) for stream in streams]
    while any(list(zip(range(2), iterator, strict=False)) for iterator in iterators):
        pass
    for stream, ids in zip(streams, ((5, 6), (40,)), strict=True):
        expected = tokens_of(resident_model, encode(*ids), max_new_tokens=10)
        assert stream.token_ids == expected[0][len(ids) :]


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


def test_loading_tells_bytes_of_dense_weights_read_and_of_all(tiny_checkpoint):
    seen: list[tuple[int, int]] = []
    with MoE(tiny_checkpoint, host_memory="25%", on_bytes=lambda *now: seen.append(now)):
        dense_bytes = inspect_checkpoint(str(tiny_checkpoint)).dense_bytes
    assert len(seen) > 1
    assert {total for _, total in seen} == {dense_bytes}
    assert max(seen) == (dense_bytes, dense_bytes)


def test_a_model_made_from_our_config_computes_as_stock(moe, stock_model):
    """The config says that experts are ours, but that model has its own."""
    made = type(stock_model)(moe.model.config).to(stock_model.dtype).eval()
    made.load_state_dict(stock_model.state_dict())
    ids = torch.tensor([[5, 6, 9, 100]])
    with torch.no_grad():
        torch.testing.assert_close(
            made(ids).logits, stock_model(ids).logits, rtol=0.02, atol=0.1
        )  # bfloat16, from other places in memory


def test_an_empty_prompt_is_the_error_of_stock(moe, stock_model):
    """It was a division by zero."""
    empty = torch.empty((1, 0), dtype=torch.long)
    for model in (stock_model, moe):
        with pytest.raises(RuntimeError, match="0 elements"):
            model.generate(empty, max_new_tokens=2)
    assert tokens_of(moe, encode(5, 6), max_new_tokens=2)


def test_a_prompt_behind_a_callers_cache_is_one_pass(tiny_checkpoint, monkeypatch):
    """However little memory there is: transformers 5.17 takes it in wrong pieces."""
    ids = torch.arange(3, 63)[None]
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    name = cache_parameter(GenerationMixin.prepare_inputs_for_generation)
    with MoE(tiny_checkpoint, dtype="float32") as moe:
        expected = moe.generate(input_ids=ids, **settings)
        monkeypatch.setattr(Room, "tokens_at_once", lambda *_, **__: 8)
        assert torch.equal(moe.generate(input_ids=ids, **settings), expected)
        cache = DynamicCache(config=moe.model.config)
        with torch.no_grad():
            moe.model(ids[:, :20], **{cache_parameter(moe.model.forward): cache})
        found = moe.generate(input_ids=ids, **{name: cache}, **settings)
        assert torch.equal(found, expected)


def test_hidden_states_are_those_of_a_whole_prompt(moe, monkeypatch):
    """transformers gives those of the last pass only."""
    room = moe.engine.room
    monkeypatch.setattr(room, "tokens_at_once", lambda *args, **kwargs: 512)
    asked: dict[str, Any] = {"input_ids": torch.zeros(1, 600, dtype=torch.int64)}
    asked["output_hidden_states"] = True
    assert in_passes(moe.model, room, asked, is_begun=False) == {"prefill_chunk_size": 512}
    asked["return_dict_in_generate"] = True
    assert in_passes(moe.model, room, asked, is_begun=False) == {}
