"""The file of a prefix is whole, of this model and arithmetic, or refused by name."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_infinity import CheckpointError, ConfigError, MoE, OutputError, output
from moe_infinity.prefixes.stored_file import checksum_of
from moe_infinity.system import machine
from tests.prefixes.tiny_models import TEXT, answer, assert_same

pytestmark = [pytest.mark.arithmetic, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def moe(tiny_checkpoint) -> Iterator[MoE]:
    with MoE(tiny_checkpoint, host_memory="50%", dtype="float32") as moe:
        yield moe


@pytest.fixture
def file(moe, tmp_path) -> Path:
    moe.save_prefix(tmp_path / "a.prefix", TEXT[:70])
    return tmp_path / "a.prefix"


def test_it_is_its_users_alone_and_nothing_lies_beside_it(file):
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\3\4" + bytes(200)])
def test_another_file_is_no_prefix(content, moe, tmp_path):
    (tmp_path / "a.prefix").write_bytes(content)
    with pytest.raises(CheckpointError, match="is no prefix, or it is damaged"):
        moe.load_prefix(tmp_path / "a.prefix")


def test_a_missing_file_and_a_folder_are_said(moe, tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        moe.load_prefix(tmp_path / "a.prefix")
    with pytest.raises(CheckpointError, match="is no prefix"):
        moe.load_prefix(tmp_path)


def test_a_harmed_file_is_refused_or_the_same(moe, file):
    """Cut off, or with flipped bits: what zip itself does not read may differ."""
    data = file.read_bytes()
    expected = moe.load_prefix(file)
    refused = 0
    for seed in range(300):
        chance = random.Random(seed)
        harmed = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            harmed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        cut = chance.randrange(len(data)) if seed % 3 == 0 else len(data)
        file.write_bytes(harmed[:cut])
        try:
            found = moe.load_prefix(file)
        except CheckpointError:
            refused += 1
            continue
        assert found.token_ids == expected.token_ids
        assert all(
            bool((one.data == two.data).all())
            for one, two in zip(found._blocks, expected._blocks, strict=True)
        )
    assert refused > 250


def test_values_that_are_changed_together_with_their_archive_fail_the_checksum(moe, file):
    with np.load(file) as arrays:
        changed = dict(arrays)
    changed["blocks"][1, 7] ^= 1
    with file.open("wb") as opened:
        np.savez(opened, **changed)
    with pytest.raises(CheckpointError, match="its checksum is wrong"):
        moe.load_prefix(file)


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": b"[]"},
        {"parts": b"{"},
        {"parts": b'[[["a"]], [], []]'},
        {"identity": b"[1]"},
        {"identity": b"\xff"},
        {"token_ids": np.arange(60)},
        {"token_ids": np.array([500] * 70)},
        {"token_ids": np.zeros(0, dtype=np.int64)},
        {"rest": np.zeros(3, dtype=np.uint8)},
        {"experts": np.zeros((3, 3, 2), dtype=np.uint16)},
    ],
)
def test_a_file_whose_arrays_do_not_fit_each_other_is_no_prefix(changes, moe, file):
    """With a checksum that is right: somebody made it so."""
    with np.load(file) as found:
        arrays = dict(found)
    del arrays["checksum"]
    for name, value in changes.items():
        is_text = isinstance(value, bytes)
        arrays[name] = np.frombuffer(value, dtype=np.uint8) if is_text else value
    with file.open("wb") as opened:
        np.savez(opened, checksum=checksum_of("", arrays), **arrays)
    with pytest.raises(CheckpointError, match="is no prefix"):
        moe.load_prefix(file)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17])
def test_a_short_prefix_is_kept_too(num_tokens, moe, tmp_path):
    moe.save_prefix(tmp_path / "a.prefix", TEXT[:num_tokens])
    prefix = moe.load_prefix(tmp_path / "a.prefix")
    settings = {"max_new_tokens": 2}
    expected = answer(moe, TEXT[:40], **settings)
    assert_same(answer(moe, TEXT[:40], prefix=prefix, **settings), expected)


def other_weights(folder: Path) -> dict[str, Any]:
    (weights,) = folder.glob("*.safetensors")
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    return {}


def other_config(folder: Path) -> dict[str, Any]:
    config = folder / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"norm_topk_prob": true', '"norm_topk_prob": false'))
    return {}


OTHERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "weights": other_weights,
    "config": other_config,
    "dtype: torch.float32, here torch.bfloat16": lambda folder: {"dtype": "bfloat16"},
    "exact: False, here True": lambda folder: {"exact": True},
    "expert_dtype: None, here int8": lambda folder: {"expert_dtype": "int8"},
    "kv_dtype: auto, here fp8": lambda folder: {"kv_dtype": "fp8"},
    "experts_implementation: auto, here eager": lambda folder: {"experts_implementation": "eager"},
}


@pytest.mark.parametrize("differs", OTHERS)
def test_another_model_or_arithmetic_is_named(differs, moe, file, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(moe.checkpoint, folder, copy_function=shutil.copy2)
    options = {"dtype": "float32"} | OTHERS[differs](folder)
    with MoE(folder, **options) as other:
        with pytest.raises(ConfigError, match=differs) as raised:
            other.load_prefix(file)
        assert str(file) in str(raised.value)


def test_a_copy_of_the_model_takes_it(moe, file, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(moe.checkpoint, folder, copy_function=shutil.copy2)
    with MoE(folder, dtype="float32") as other:
        assert_same(
            answer(other, TEXT[:90], prefix=other.load_prefix(file)), answer(moe, TEXT[:90])
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_are_kept_bit_for_bit(dtype, tiny_checkpoint, tmp_path):
    with MoE(tiny_checkpoint, dtype=dtype) as moe:
        saved = moe.save_prefix(tmp_path / "a.prefix", TEXT[:70])
        loaded = moe.load_prefix(tmp_path / "a.prefix")
        found = [answer(moe, TEXT[:90], prefix=prefix) for prefix in (saved, loaded)]
        assert found[0].sequences.tolist() == found[1].sequences.tolist()
        for one, two in zip(found[0].logits, found[1].logits, strict=True):
            assert bool((one == two).all())


def test_a_folder_that_takes_nothing_is_an_error_and_leaves_the_old_file(moe, file, monkeypatch):
    before = file.read_bytes()

    def refuse(*args: Any) -> int:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(output, "create_new", refuse)
    with pytest.raises(OutputError, match="Read-only"):
        moe.save_prefix(file, TEXT[:40])
    assert file.read_bytes() == before
    assert list(file.parent.iterdir()) == [file]


# Memory


@pytest.fixture
def kept_free(moe, monkeypatch) -> list[int]:
    """The bytes for which room was made, as they come."""
    asked: list[int] = []
    room, keep_free = moe.engine.room, moe.engine.room.keep_free

    def keeping(num_bytes: int) -> int:
        asked.append(num_bytes)
        found: int = keep_free(num_bytes)
        return found

    monkeypatch.setattr(room, "keep_free", keeping)
    return asked


def test_experts_make_room_for_a_prefix(moe, file, kept_free):
    """Before it is read, before a cache is filled with it, and before its file is put together."""
    prefix = moe.load_prefix(file)
    (asked,) = kept_free
    assert 2 * prefix.num_bytes <= asked <= 2 * file.stat().st_size
    kept_free.clear()
    answer(moe, TEXT[:90], prefix=prefix)
    assert kept_free[0] == 2 * prefix.num_bytes
    kept_free.clear()
    token_bytes = moe.save_prefix(file, TEXT[:70]).num_bytes // 70
    assert {2 * 64 * token_bytes, 2 * 6 * token_bytes} <= set(kept_free)  # of its two passes
    assert kept_free[-1] == 70 * token_bytes


def test_a_prefix_for_which_there_is_no_memory_is_not_called_damaged(moe, file, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(machine, "available_memory_bytes", lambda: 1000)
        with pytest.raises(CheckpointError, match="too little memory for it") as raised:
            moe.load_prefix(file)
    assert "damaged" not in str(raised.value)
    assert moe.load_prefix(file).token_ids == TEXT[:70]
