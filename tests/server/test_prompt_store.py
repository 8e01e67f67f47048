"""What a prompt store keeps is found again, and nothing on its disk changes a token."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.prefixes import prompt_store
from moe_infinity.prefixes.cache_bytes import CacheBytes, Part
from moe_infinity.prefixes.prompt_store import PromptStore
from moe_infinity.prefixes.store_key import key_of
from moe_infinity.prefixes.stored_file import Damaged, Stored, contents, file_bytes
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.engine import Engine
from moe_infinity.server.prefix_options import store_of
from tests.conftest import save_tokenizer
from tests.server.driving import Client, answered, assert_same_answer, cached
from tests.server.harmed_files import HARM, a_folder, files_in
from tests.sweep import tiny
from tests.sweep.discover import architectures_in

pytestmark = pytest.mark.arithmetic

TEXT = [(7 * at * at + at) % 120 + 3 for at in range(400)]
PROMPT = TEXT[:300]
LONGER = TEXT[:330]


def store_at(moe: MoE, folder: Path, **options: Any) -> PromptStore:
    store = store_of(moe, ServeConfig(prompt_store=str(folder), **options))
    assert store is not None
    return store


def engine_at(moe: MoE, folder: Path, **options: Any) -> Engine:
    settings: dict[str, Any] = {"max_batch": 2, "prefix_cache": "64MiB"} | options
    return Engine(moe, ServeConfig(**settings), store_at(moe, folder))


def asked(moe: MoE, folder: Path, prompt: list[int], **wishes: Any) -> Client:
    """The answer of an engine that begins with what is on the disk, and writes all at its end."""
    engine = engine_at(moe, folder)
    client = answered(engine, prompt, **wishes)
    engine.close()
    return client


def alone(moe: MoE, prompt: list[int]) -> Client:
    return answered(Engine(moe, ServeConfig(max_batch=2, prefix_cache="off")), prompt)


@pytest.fixture(scope="module")
def expected(moe) -> Client:
    return alone(moe, LONGER)


@pytest.fixture(scope="module")
def left(moe, tmp_path_factory) -> Path:
    """All that an answer to PROMPT left. Read-only."""
    folder = tmp_path_factory.mktemp("left") / "store"
    asked(moe, folder, PROMPT)
    return folder


@pytest.fixture
def folder(left, tmp_path) -> Path:
    """A copy of what an answer to PROMPT left."""
    return Path(shutil.copytree(left, tmp_path / "store"))


def test_the_next_turn_after_a_restart_goes_on_where_the_last_answer_ended(moe, tmp_path):
    first = asked(moe, tmp_path, PROMPT)
    turn = [*PROMPT, *first.token_ids, *TEXT[40:70]]
    engine = engine_at(moe, tmp_path)
    found = answered(engine, turn)
    assert cached(found) == (len(PROMPT) + len(first.token_ids) - 1) // 16 * 16
    assert_same_answer(found, alone(moe, turn))
    counts = engine.state()["prompt_store"]
    assert (counts["hits"], counts["tokens"]) == (1, cached(found))
    assert counts["read_bytes"] > 0
    engine.close()


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h", "lfm2_moe"])
def test_states_are_found_again(name, tmp_path):
    tiny.tiny_model(architectures_in(name)[0]).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    store = tmp_path / "store"
    with MoE(tmp_path, dtype="float32") as moe:
        first = asked(moe, store, PROMPT)
        turn = [*PROMPT, *first.token_ids, *TEXT[40:70]]
        found = asked(moe, store, turn)
        assert cached(found) == len(PROMPT) + len(first.token_ids) - 1
        assert_same_answer(found, alone(moe, turn))
        other = asked(moe, store, [*PROMPT, *TEXT[50:60]])
        assert cached(other) == len(PROMPT)
        assert_same_answer(other, alone(moe, [*PROMPT, *TEXT[50:60]]))


def test_what_memory_dropped_is_read_again(moe, tmp_path):
    """There is room for one of these."""
    engine = engine_at(moe, tmp_path / "other")
    answered(engine, [4, *PROMPT])
    room = engine.state()["prefix_bytes"] * 3 // 2
    engine.close()
    engine = engine_at(moe, tmp_path / "store", prefix_cache=str(room))
    texts = [[start, *PROMPT] for start in (5, 6)]
    first = []
    for number, text in enumerate(texts, 1):
        first.append(answered(engine, text))
        wait_for_files(tmp_path / "store", number * ((len(text) + 11) // 16))
    for text, client in zip(texts, first, strict=True):
        again = answered(engine, text)
        assert cached(again) == len(text) // 16 * 16
        assert_same_answer(again, client)
    assert engine.state()["prompt_store"]["hits"] == 2
    assert engine.state()["prefix_bytes"] <= room
    engine.close()


def test_room_is_made_before_prompts_are_read(moe, folder, monkeypatch):
    happened: list[tuple[str, int]] = []
    read = PromptStore.read

    def reading(store: PromptStore, files: Sequence[str]) -> list[Stored]:
        found = read(store, files)
        happened.append(("read", sum(stored.data.nbytes for stored in found)))
        return found

    monkeypatch.setattr(PromptStore, "read", reading)
    room = moe.engine.room
    keep_free = room.keep_free

    def keeping(wanted: int) -> int:
        happened.append(("room", wanted))
        return keep_free(wanted)

    monkeypatch.setattr(room, "keep_free", keeping)
    engine = engine_at(moe, folder)
    answered(engine, LONGER)
    engine.close()
    (before, wanted), (then, taken) = happened[:2]
    assert (before, then) == ("room", "read")
    assert wanted >= taken > 0


def test_owners_do_not_share(moe, folder):
    shares = [cached(asked(moe, folder, LONGER, owner=owner)) for owner in ("a", "b", "a", "")]
    assert shares == [0, 0, 320, 288]


def test_a_short_prompt_leaves_nothing(moe, tmp_path):
    asked(moe, tmp_path, TEXT[:230])
    assert files_in(tmp_path) == []


def test_files_are_their_users_alone_and_have_nothing_to_read(moe, tmp_path):
    engine = engine_at(moe, tmp_path)
    answered(engine, PROMPT, owner="secret-key")
    engine.close()
    (own,) = tmp_path.iterdir()
    assert own.stat().st_mode & 0o777 == 0o700
    for path in files_in(tmp_path):
        assert path.stat().st_mode & 0o777 == 0o600
        assert b"secret-key" not in path.read_bytes()
    assert not [path for path in files_in(tmp_path) if "partial" in path.name]


# whose files


def test_other_weights_dtypes_and_arithmetics_have_other_keys(tiny_checkpoint, tmp_path):
    """Down to one weight in the middle of a file, and to a change that leaves every sample."""
    same, other = tmp_path / "same", tmp_path / "other"
    for copy in (same, other):
        shutil.copytree(tiny_checkpoint, copy, copy_function=shutil.copy2)
    (weights,) = other.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    keys = []
    for path, options in (
        (tiny_checkpoint, {}),
        (same, {}),
        (other, {}),
        (same, {"dtype": "bfloat16"}),
        (same, {"exact": True}),
        (same, {"expert_dtype": "int8"}),
        (same, {"kv_dtype": "int8"}),
        (same, {"kv_dtype": "fp8"}),
        (same, {"experts_implementation": "eager"}),
    ):
        with MoE(path, **({"dtype": "float32"} | options)) as moe:
            keys.append(key_of(moe))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 8


def test_a_model_finds_nothing_of_another_with_equal_shapes(moe, folder, tmp_path):
    model = tiny.tiny_model(architectures_in("qwen3_moe")[0])
    model.lm_head.weight.data *= 2
    model.save_pretrained(tmp_path / "other")
    save_tokenizer(tmp_path / "other")
    with MoE(tmp_path / "other", dtype="float32") as other:
        assert cached(asked(other, folder, LONGER)) == 0
    assert cached(asked(moe, folder, LONGER)) == 288


# what can go wrong


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("seeds", [(1,), pytest.param((0, 2, 3), marks=pytest.mark.slow)])
def test_a_harmed_file_ends_what_is_known_and_changes_no_token(
    harm, seeds, moe, folder, expected, tmp_path, caplog
):
    for seed in seeds:
        chance = random.Random(seed)
        harmed = tmp_path / str(seed)
        shutil.copytree(folder, harmed)
        for path in chance.sample(files_in(harmed), 1 + seed % 2):
            if path.is_file():
                harm(path, chance)
        caplog.clear()
        found = asked(moe, harmed, LONGER)
        assert cached(found) <= 288
        assert_same_answer(found, expected)
        assert sum("is not used" in record.message for record in caplog.records) <= 1
        # What was of no use was written anew.
        if harm is not a_folder:
            assert cached(asked(moe, harmed, LONGER)) == 320


def test_bytes_that_are_no_file_of_ours_are_damaged():
    stored = Stored(torch.arange(64, dtype=torch.uint8), None, PARTS)
    data = file_bytes("a.block", stored)
    assert torch.equal(contents("a.block", data).data, stored.data)
    chance = random.Random(1)
    with pytest.raises(Damaged):
        contents("b.block", data)
    for _ in range(300):
        harmed = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            harmed[chance.randrange(len(data))] = chance.randrange(256)
        cut = bytes(harmed[: chance.choice([len(data), chance.randrange(len(data))])])
        if cut == data:
            continue
        try:
            found = contents("a.block", cut)
        except Damaged:
            continue
        assert torch.equal(found.data, stored.data), "names of arrays may differ, not values"


PARTS = CacheBytes((Part(0, "keys", 0, torch.float32, (2, 4)),), (), ())


def test_a_folder_that_vanishes_is_made_again(moe, tmp_path, expected):
    engine = engine_at(moe, tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    assert_same_answer(answered(engine, LONGER), expected)
    engine.close()
    assert cached(asked(moe, tmp_path / "store", LONGER)) == 320


def test_a_disk_that_takes_nothing_is_said_once(moe, tmp_path, monkeypatch, expected, caplog):
    """As a full disk and a read-only one do."""

    def refuse(*args: Any) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(prompt_store, "create_new", refuse)
    engine = engine_at(moe, tmp_path)
    for prompt in (PROMPT, LONGER):
        client = answered(engine, prompt)
    assert_same_answer(client, expected)
    engine.close()
    assert files_in(tmp_path) == []
    assert sum("Read-only" in record.message for record in caplog.records) == 1


def test_a_disk_keeps_room_for_others(moe, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(prompt_store, "FREE_BYTES", 1 << 60)
    asked(moe, tmp_path, PROMPT)
    assert files_in(tmp_path) == []
    assert "no room" in caplog.text


@pytest.mark.parametrize("place", ["/proc/store", "/dev/null/store"])
def test_a_place_for_no_folder_is_said(place, moe, caplog, expected):
    engine = engine_at(moe, Path(place))
    assert_same_answer(answered(engine, LONGER), expected)
    engine.close()
    assert "the prompt store" in caplog.text


def test_a_folder_that_others_may_write_to_is_not_used(moe, tmp_path, caplog):
    tmp_path.chmod(0o777)
    asked(moe, tmp_path, PROMPT)
    assert "others may write to it" in caplog.text
    assert files_in(tmp_path) == []


def test_a_slow_disk_is_given_up(moe, folder, monkeypatch, expected, caplog):
    stuck = threading.Event()
    monkeypatch.setattr(prompt_store, "READ_S", 0.05)
    monkeypatch.setattr(prompt_store._Reading, "run", lambda task: stuck.wait(20))
    engine = engine_at(moe, folder)
    for prompt in (LONGER, LONGER[:-1]):
        client = answered(engine, prompt)
        assert cached(client) in (0, 320)  # the latter from memory
    stuck.set()
    engine.close()
    assert sum("reading took" in record.message for record in caplog.records) == 1


def test_all_files_take_no_more_than_the_size_and_the_oldest_go_first(moe, tmp_path):
    one = sum(path.stat().st_size for path in files_in(first_files(moe, tmp_path / "one")))
    both = tmp_path / "both"
    for start in (5, 6, 7, 5):
        store = store_at(moe, both, prompt_store_size=str(one * 5 // 2))
        engine = Engine(moe, ServeConfig(max_batch=2, prefix_cache="64MiB"), store)
        answered(engine, [start, *PROMPT])
        engine.close()
        assert sum(path.stat().st_size for path in files_in(both)) <= one * 5 // 2
        time.sleep(0.01)
    assert cached(asked(moe, both, [7, *LONGER])) >= 288
    assert cached(asked(moe, both, [5, *LONGER])) >= 288
    assert cached(asked(moe, both, [6, *LONGER])) < 288


def first_files(moe: MoE, folder: Path) -> Path:
    asked(moe, folder, [4, *PROMPT])
    return folder


def test_files_of_others_are_left_alone(moe, tmp_path):
    mine = [tmp_path / "notes.txt", tmp_path / ("a" * 32) / "notes.txt"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        os.utime(path, (1, 1))
    store = store_at(moe, tmp_path, prompt_store_size="1KB")
    engine = Engine(moe, ServeConfig(max_batch=2, prefix_cache="64MiB"), store)
    answered(engine, PROMPT)
    engine.close()
    assert files_in(tmp_path) == sorted(mine)


def test_two_servers_share_a_folder(moe, tmp_path, expected):
    engines = [engine_at(moe, tmp_path) for _ in range(2)]
    clients = [answered(each, LONGER) for each in engines]
    for client in clients:
        assert_same_answer(client, expected)
    for engine in engines:
        engine.close()
    assert cached(asked(moe, tmp_path, LONGER)) == 320
    assert len(files_in(tmp_path)) == 330 // 16 + 1


def wait_for_files(folder: Path, num_files: int) -> None:
    end = time.monotonic() + 20
    while len(files_in(folder)) != num_files:
        assert time.monotonic() < end
        time.sleep(0.01)
