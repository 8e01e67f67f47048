"""A prompt of a command is kept in a folder, and begins with what the folder has of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import platformdirs
import pytest

from moe_infinity import MoE, UnsupportedModelError
from moe_infinity.memory.room import Room
from moe_infinity.prefixes import kept, prompt_store
from moe_infinity.prefixes.kept import kept_prompt
from moe_infinity.prefixes.prefix_cache import PrefixCache
from moe_infinity.prefixes.store_key import open_store
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.engine import Engine
from moe_infinity.server.prefix_options import store_of
from tests.prefixes.tiny_models import (
    KINDS,
    NUM_TRIED,
    RECURRENT,
    TEXT,
    answer,
    assert_same,
    computed,
    save_tiny,
)
from tests.server.driving import answered, cached

pytestmark = [pytest.mark.arithmetic, pytest.mark.timeout(120)]
PROMPT = TEXT[:300]
LONGER = [*PROMPT, *TEXT[40:70]]


@pytest.fixture
def moe(tiny_checkpoint) -> Any:
    with MoE(tiny_checkpoint, host_memory="50%", dtype="float32") as moe:
        yield moe
        moe.check_invariants()


def run(moe: MoE, folder: Path, ids: list[int]) -> tuple[Any, int]:
    """The answer, and how many tokens of the prompt were computed before its last."""
    before = computed(moe)
    with kept_prompt(moe, str(folder), "1GiB") as prompt:
        found = answer(moe, ids, prefix=prompt)
    return found, computed(moe) - before


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", KINDS)
def test_a_later_process_begins_behind_what_is_kept(name, tmp_path):
    folder = save_tiny(name, tmp_path / "model")
    store = tmp_path / "store"
    num_first = (len(PROMPT) - 1) // 16 * 16 if name not in RECURRENT else len(PROMPT) - 1
    for prompt, num_known in ((PROMPT, 0), (PROMPT, num_first), (LONGER, num_first)):
        with MoE(folder, host_memory="50%", dtype="float32") as moe:
            expected = answer(moe, prompt)
            found, num_computed = run(moe, store, prompt)
            assert_same(found, expected)
            num_tried = NUM_TRIED if name in RECURRENT and num_known == 0 else 0
            assert num_computed == len(prompt) - 1 - num_known + num_tried


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "lfm2_moe"])
def test_a_prompt_of_several_passes_is_kept_whole(name, tmp_path, monkeypatch):
    with MoE(save_tiny(name, tmp_path / "model"), dtype="float32") as moe:
        expected = answer(moe, PROMPT)
        monkeypatch.setattr(Room, "tokens_at_once", lambda self, num_new, context, most: 50)
        assert_same(run(moe, tmp_path / "store", PROMPT)[0], expected)
        found, num_computed = run(moe, tmp_path / "store", PROMPT)
        assert_same(found, expected)
        assert num_computed < 16


def test_run_and_serve_share_a_folder(moe, tmp_path):
    config = ServeConfig(max_batch=2, prefix_cache="64MiB", prompt_store=str(tmp_path))
    run(moe, tmp_path, PROMPT)
    engine = Engine(moe, config, store_of(moe, config))
    assert cached(answered(engine, LONGER)) == 288
    engine.close()
    assert run(moe, tmp_path, LONGER)[1] == len(LONGER) - 1 - 320


def test_a_short_prompt_leaves_nothing(moe, tmp_path):
    found, num_computed = run(moe, tmp_path, TEXT[:200])
    assert_same(found, answer(moe, TEXT[:200]))
    assert num_computed == 200
    assert files_in(tmp_path) == []


def test_a_damaged_file_changes_no_token(moe, tmp_path):
    expected = answer(moe, PROMPT)
    run(moe, tmp_path, PROMPT)
    files = files_in(tmp_path)
    for number, path in enumerate(files):
        data = bytearray(path.read_bytes())
        data[number * 31 % len(data)] ^= 1
        path.write_bytes(data[: len(data) - number % 2])
    found, num_computed = run(moe, tmp_path, PROMPT)
    assert_same(found, expected)
    assert num_computed == len(PROMPT) - 1
    assert run(moe, tmp_path, PROMPT)[1] < 16, "it was written anew"


def test_a_folder_that_takes_nothing_is_a_warning(moe, tmp_path, monkeypatch, caplog):
    def refuse(*args: Any) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(prompt_store, "create_new", refuse)
    assert_same(run(moe, tmp_path, PROMPT)[0], answer(moe, PROMPT))
    assert files_in(tmp_path) == []
    assert sum("Read-only" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), RuntimeError("no home folder")]
)
def test_a_folder_that_cannot_be_used_is_a_warning(error, moe, tmp_path, monkeypatch, caplog):
    def refuse(*args: Any) -> None:
        raise error

    monkeypatch.setattr(kept, "open_store", refuse)
    with kept_prompt(moe, str(tmp_path), "1GiB") as prompt:
        assert prompt is None
        assert_same(answer(moe, PROMPT, prefix=prompt), answer(moe, PROMPT))
    assert f"the prompt is not kept on disk: {error}" in caplog.messages
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_named_takes_no_home_folder(moe, tmp_path, monkeypatch):
    def refuse(*args: Any) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(platformdirs, "user_cache_path", refuse)
    store = open_store(moe, str(tmp_path / "store"), "1GiB")
    assert store.is_empty
    store.close()
    assert (tmp_path / "store").is_dir()


def test_two_prompts_at_once_keep_what_both_have(moe, tiny_checkpoint, tmp_path):
    """As two processes that write the same files do."""
    with (
        MoE(tiny_checkpoint, dtype="float32") as other,
        kept_prompt(moe, str(tmp_path), "1GiB") as one,
        kept_prompt(other, str(tmp_path), "1GiB") as two,
    ):
        found = [answer(moe, PROMPT, prefix=one), answer(other, LONGER, prefix=two)]
    assert_same(found[0], answer(moe, PROMPT))
    assert_same(found[1], answer(moe, LONGER))
    assert run(moe, tmp_path, LONGER)[1] < 16
    assert not [path for path in files_in(tmp_path) if "partial" in path.name]


def test_files_are_their_users_alone(moe, tmp_path):
    run(moe, tmp_path, PROMPT)
    assert {path.stat().st_mode & 0o777 for path in files_in(tmp_path)} == {0o600}
    assert os.stat(next(tmp_path.iterdir())).st_mode & 0o777 == 0o700


def test_a_model_that_cannot_go_on_is_an_error(tmp_path):
    with (
        MoE(save_tiny("jamba", tmp_path / "model"), dtype="float32") as moe,
        pytest.raises(UnsupportedModelError, match="cannot be kept"),
    ):
        run(moe, tmp_path / "store", PROMPT)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_what_memory_has_no_room_to_keep_is_said(name, tmp_path, monkeypatch, caplog):
    with MoE(save_tiny(name, tmp_path / "model"), host_memory="50%", dtype="float32") as moe:
        run(moe, tmp_path / "all", PROMPT)
        assert "room to keep" not in caplog.text
        monkeypatch.setattr(kept, "SHARE", 1e-12)
        run(moe, tmp_path / "none", PROMPT)
    assert "memory has room to keep 0 of the prompt's 300 tokens" in caplog.text


def test_a_state_without_room_is_said(tmp_path, monkeypatch, caplog):
    """Blocks alone are of no use to a model that has one."""
    monkeypatch.setattr(PrefixCache, "_set_state", lambda *_: None)
    folder = save_tiny("qwen3_next", tmp_path / "model")
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        run(moe, tmp_path / "store", PROMPT)
    assert "memory has room to keep 0 of the prompt's 300 tokens" in caplog.text
