"""What a predictor learned survives on disk, whole, for the same model only, or is refused."""

from __future__ import annotations

import errno
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from moe_infinity.errors import TraceError
from moe_infinity.experts import Phase, Step
from moe_infinity.predict import tables
from moe_infinity.predict.history import load_history, save_history
from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.recorder import Recorder

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2


def run(predictor: Predictor, seed: int, *, num_tokens: int = 30, top: int = 20) -> np.ndarray:
    """One request of decode steps with random routing; the chances after it."""
    rng = np.random.default_rng(seed)
    recorder = Recorder(NUM_LAYERS, NUM_EXPERTS)
    for token in range(num_tokens):
        begins = np.full(1, token == 0)
        step = Step(Phase.DECODE, 1, 1, begins, token_ids_T=rng.integers(0, top, 1))
        predictor.begin_step(step, recorder.begin_step(step))
        for layer in range(NUM_LAYERS):
            experts_TK = rng.permutation(NUM_EXPERTS)[None, :TOP_K]
            predictor.observe(layer, recorder.record(layer, experts_TK))
    predictor.finish(recorder.request_eams())
    return predictor.next_use_LE.copy()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.npz"


@pytest.fixture
def learned() -> Predictor:
    predictor = Predictor(NUM_LAYERS, NUM_EXPERTS)
    run(predictor, 1)
    return predictor


def fresh() -> Predictor:
    return Predictor(NUM_LAYERS, NUM_EXPERTS)


def test_a_predictor_goes_on_as_if_it_had_never_stopped(path, learned):
    save_history(path, learned, signature="tiny")
    loaded = fresh()
    load_history(path, loaded, signature="tiny")
    assert list(path.parent.iterdir()) == [path]
    # A new request begins in both: what one of them knew besides the file would show.
    np.testing.assert_array_equal(run(loaded, 2), run(learned, 2))
    assert not np.array_equal(run(fresh(), 2), run(learned, 2))


def test_the_history_of_another_model_is_refused(path, learned):
    save_history(path, learned, signature="one")
    with pytest.raises(TraceError, match="signature 'one', expected 'other'"):
        load_history(path, fresh(), signature="other")


def test_the_newest_tokens_are_kept_when_the_table_is_smaller(path, learned, monkeypatch):
    save_history(path, learned, signature="tiny")
    monkeypatch.setattr(tables, "MAX_TOKENS", 5)
    small = fresh()
    load_history(path, small, signature="tiny")
    expected = learned.tokens.arrays()
    got = small.tokens.arrays()
    assert got["token_ids"].tolist() == expected["token_ids"].tolist()[-5:]
    np.testing.assert_array_equal(got["token_counts"], expected["token_counts"][:, -5:])
    np.testing.assert_array_equal(got["token_uses"], expected["token_uses"][:, -5:])


def rewrite(path: Path, **changes: np.ndarray | None) -> None:
    arrays = dict(np.load(path)) | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize(("version", "said"), [(2, "2"), (None, "not a history: arrays")])
def test_another_format_version_is_refused(path, learned, version, said):
    save_history(path, learned, signature="tiny")
    rewrite(path, format_version=None if version is None else np.array(version))
    with pytest.raises(TraceError, match=said):
        load_history(path, fresh(), signature="tiny")


DAMAGES = {
    "base rates of another model": {"base": np.ones((2, 2), np.float32)},
    "other weights": {"weights": np.zeros((1, 8), np.float32)},
    "requests of another shape": {
        "prefill": np.zeros((1, 1, 2), np.float32),
        "decode": np.full((1, 1, 2), 0.5, np.float32),
    },
    "transitions of another shape": {"transitions_counts": np.zeros((1, 1, 1), np.float32)},
    "no transitions": {"transitions_uses": None},
    "tokens without counts": {"token_counts": np.zeros((2, 1), np.uint8)},
    "one token id": {"token_ids": np.array(3)},
    "more requests than there is room for": {
        "prefill": np.zeros((121, NUM_LAYERS, NUM_EXPERTS), np.float32),
        "decode": np.zeros((121, NUM_LAYERS, NUM_EXPERTS), np.float32),
    },
    "prompts without answers": {"decode": np.zeros((0, NUM_LAYERS, NUM_EXPERTS), np.float32)},
    "no prompts": {"prefill": None},
    "a number for answers": {"decode": np.float32(1)},
    "base rates in words": {"base": np.full((NUM_LAYERS, NUM_EXPERTS), "often")},
    "many numbers of tokens": {"num_tokens": np.arange(3)},
}


@pytest.mark.parametrize("changes", DAMAGES.values(), ids=DAMAGES)
def test_arrays_that_do_not_fit_are_refused(path, learned, changes):
    save_history(path, learned, signature="tiny")
    rewrite(path, **changes)
    with pytest.raises(TraceError, match="not a history"):
        load_history(path, fresh(), signature="tiny")


def test_a_file_with_another_byte_in_the_middle_is_refused(path, learned):
    save_history(path, learned, signature="tiny")
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        offset = archive.getinfo("transitions_counts.npy").header_offset
    content[offset + 100] ^= 1
    path.write_bytes(content)
    with pytest.raises(TraceError, match="not a history"):
        load_history(path, fresh(), signature="tiny")


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04"])
def test_a_file_that_is_no_history_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(TraceError, match="not a history"):
        load_history(path, fresh(), signature="tiny")


def test_a_file_cut_short_is_refused(path, learned):
    save_history(path, learned, signature="tiny")
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(TraceError, match="not a history"):
            load_history(path, fresh(), signature="tiny")


def no_space(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("where", "name"), [(np, "savez_compressed"), (os, "fsync"), (Path, "replace")]
)
def test_a_full_disk_leaves_the_old_file_and_no_partial_one(
    path, monkeypatch, learned, where, name
):
    save_history(path, learned, signature="tiny")
    before = path.read_bytes()
    monkeypatch.setattr(where, name, no_space)
    with pytest.raises(TraceError, match="could not be written: No space left on device"):
        save_history(path, fresh(), signature="tiny")
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == before
