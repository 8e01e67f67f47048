"""Trace files: complete and true, or refused; written completely, or not at all."""

from __future__ import annotations

import errno
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_infinity.errors import TraceError
from moe_infinity.predict.tracefile import SequenceTrace, load_trace, save_trace

SHARED_TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
NUM_LAYERS, TOP_K = 3, 2
EXPERTS = np.arange(5 * NUM_LAYERS * TOP_K, dtype=np.uint8).reshape(5, NUM_LAYERS, TOP_K)
OFFSETS = np.array([0, 2, 5])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.npz"


def sequence(num_tokens: int, *, num_experts: int = 8, seed: int = 0) -> SequenceTrace:
    rng = np.random.default_rng(seed)
    return SequenceTrace(
        rng.random((num_tokens, NUM_LAYERS, num_experts)).argsort(axis=2)[:, :, :TOP_K],
        rng.integers(-1, 50_000, num_tokens),
        np.arange(num_tokens) < num_tokens // 2,
        np.maximum(np.arange(num_tokens) - num_tokens // 2 + 1, 0),
    )


def assert_same(got: list[SequenceTrace], expected: list[SequenceTrace]) -> None:
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.experts_TLK, other.experts_TLK)
        np.testing.assert_array_equal(one.token_ids_T, other.token_ids_T)
        np.testing.assert_array_equal(one.is_prefill_T, other.is_prefill_T)
        np.testing.assert_array_equal(one.steps_T, other.steps_T)


def zip_of(**members: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def npz_of(**arrays: object) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


def npy_of(array: object) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array))
    return file.getvalue()


def encrypted(content: bytes) -> bytes:
    """The first member is marked as encrypted in the directory of the zip."""
    flags = content.index(b"PK\x01\x02") + 8
    return content[:flags] + bytes([content[flags] | 1]) + content[flags + 1 :]


def header_of(*shape: int) -> bytes:
    """An array file that ends where its numbers should begin."""
    file = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


# Round trip


def test_what_was_saved_is_what_is_loaded(path):
    sequences = [sequence(4, seed=1), sequence(0), sequence(7, seed=2)]
    save_trace(path, sequences, num_experts=8)
    assert_same(load_trace(path).sequences, sequences)


def test_the_file_is_laid_out_as_the_shared_traces_are(path):
    save_trace(path, [sequence(4), sequence(3)], num_experts=8)
    with np.load(path) as file:
        assert (file["experts"].dtype, file["experts"].shape) == (np.uint8, (7, NUM_LAYERS, TOP_K))
        assert file["offsets"].dtype == np.int64
        assert file["offsets"].tolist() == [0, 4, 7]
        assert (file["token_ids"].dtype, file["token_ids"].shape) == (np.int64, (7,))
        assert (file["is_prefill"].dtype, file["is_prefill"].shape) == (np.bool_, (7,))
        assert int(file["num_experts"]) == 8


@pytest.mark.parametrize(("num_experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_more_than_256_experts_take_two_bytes_each(path, num_experts, dtype):
    recorded = sequence(3)
    recorded.experts_TLK[0, 0] = 0, num_experts - 1
    save_trace(path, [recorded], num_experts=num_experts)
    (loaded,) = load_trace(path).sequences
    assert loaded.experts_TLK.dtype == dtype
    assert_same([loaded], [recorded])


def test_a_trace_with_only_experts_and_offsets_is_a_trace(path):
    path.write_bytes(npz_of(experts=EXPERTS, offsets=OFFSETS))
    first, second = load_trace(path).sequences
    np.testing.assert_array_equal(first.experts_TLK, EXPERTS[:2])
    np.testing.assert_array_equal(second.experts_TLK, EXPERTS[2:])
    assert second.token_ids_T.tolist() == [-1, -1, -1], "unknown"
    assert second.is_prefill_T.tolist() == [False] * 3


@pytest.mark.parametrize(
    ("name", "num_sequences", "num_tokens", "num_layers", "top_k", "num_experts"),
    [
        ("gpt-oss-20b_decode", 495, 151_930, 24, 4, 32),
        ("deepseek-v2-lite_esft", 155, 22_082, 26, 6, 64),
    ],
)
def test_the_shared_traces_are_read(
    name, num_sequences, num_tokens, num_layers, top_k, num_experts
):
    file = SHARED_TRACES / name / "experts.npz"
    if not file.exists():
        pytest.skip(f"{file} is not on this machine")
    sequences = load_trace(file).sequences
    assert len(sequences) == num_sequences
    assert sum(len(s.experts_TLK) for s in sequences) == num_tokens
    assert {s.experts_TLK.shape[1:] for s in sequences} == {(num_layers, top_k)}
    assert max(s.experts_TLK.max() for s in sequences) == num_experts - 1


# Atomic


def no_space(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def half_a_file(file: io.BufferedWriter, **arrays: object) -> None:
    file.write(b"PK\x03\x04 and then nothing")
    no_space()


@pytest.mark.parametrize("has_old_file", [True, False])
@pytest.mark.parametrize(
    ("where", "name", "fail"),
    [(np, "savez_compressed", half_a_file), (os, "fsync", no_space), (Path, "replace", no_space)],
    ids=["write", "sync", "rename"],
)
def test_a_full_disk_leaves_the_old_file_and_no_partial_one(
    path, monkeypatch, where, name, fail, has_old_file
):
    old = [sequence(4)]
    if has_old_file:
        save_trace(path, old, num_experts=8)
    monkeypatch.setattr(where, name, fail)
    with pytest.raises(TraceError, match="could not be written: No space left on device"):
        save_trace(path, [sequence(5)], num_experts=8)
    assert list(path.parent.iterdir()) == ([path] if has_old_file else [])
    if has_old_file:
        assert_same(load_trace(path).sequences, old)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numpy < 2.2
def test_a_disk_that_fills_up_while_writing_is_a_trace_error(path):
    """The kernel refuses in the middle of a real write, and again when the zip is closed."""
    resource = pytest.importorskip("resource", reason="POSIX only")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(TraceError, match="could not be written"):
            save_trace(path, [sequence(20_000)], num_experts=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(path.parent.iterdir()) == []


def test_the_old_file_is_whole_until_the_new_one_is(path, monkeypatch):
    old, new = [sequence(4)], [sequence(9, seed=1)]
    save_trace(path, old, num_experts=8)
    sync = os.fsync

    def look_at_the_file_then_sync(fd: int) -> None:
        assert_same(load_trace(path).sequences, old)
        sync(fd)

    monkeypatch.setattr(os, "fsync", look_at_the_file_then_sync)
    save_trace(path, new, num_experts=8)
    assert_same(load_trace(path).sequences, new)


def test_an_interrupted_save_leaves_no_partial_file(path, monkeypatch):
    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_trace(path, [sequence(4)], num_experts=8)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("place", ["no folder", "a file as folder", "a folder", "a long name"])
def test_a_place_that_cannot_be_written_is_a_trace_error(tmp_path, place):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    before = sorted(tmp_path.rglob("*"))
    path = {
        "no folder": tmp_path / "none" / "trace.npz",
        "a file as folder": file / "trace.npz",
        "a folder": folder,
        "a long name": tmp_path / ("x" * 300),
    }[place]
    with pytest.raises(TraceError, match="could not be written"):
        save_trace(path, [sequence(2)], num_experts=8)
    assert sorted(tmp_path.rglob("*")) == before


def test_nothing_recorded_is_not_saved(path):
    with pytest.raises(TraceError, match="nothing was recorded"):
        save_trace(path, [], num_experts=8)
    assert not path.exists()


# Files that are not traces

WELL_FORMED: dict[str, object] = {"experts": EXPERTS, "offsets": OFFSETS}
DIFFERENT_ARRAYS: dict[str, dict[str, object]] = {
    "offsets that descend": {"offsets": np.array([0, 3, 2, 5])},
    "offsets that begin late": {"offsets": np.array([1, 5])},
    "offsets that end early": {"offsets": np.array([0, 4])},
    "offsets beyond the tokens": {"offsets": np.array([0, 6])},
    "no offsets": {"offsets": np.zeros(0, dtype=np.int64)},
    "one number for offsets": {"offsets": np.int64(5)},
    "offsets of two dimensions": {"offsets": OFFSETS[None]},
    "offsets that are not whole": {"offsets": np.array([0.0, 2.5, 5.0])},
    "offsets that are words": {"offsets": np.array(["begin", "end"])},
    "experts of two dimensions": {"experts": EXPERTS[:, :, 0]},
    "one number for experts": {"experts": np.uint8(5)},
    "experts that are not whole": {"experts": EXPERTS + 0.5},
    "pickled experts": {"experts": np.array([{"a": 1}] * 5, dtype=object)},
    "pickled offsets": {"offsets": np.array([0, None, 5], dtype=object)},
    "too many token ids": {"token_ids": np.zeros(6, dtype=np.int64)},
    "one number for token ids": {"token_ids": np.int64(5)},
    "token ids of two dimensions": {"token_ids": np.zeros((5, 2), dtype=np.int64)},
    "too few prefill flags": {"is_prefill": np.zeros(4, dtype=bool)},
    "one prefill flag": {"is_prefill": np.bool_(True)},
    "prefill flags of two dimensions": {"is_prefill": np.zeros((5, 2), dtype=bool)},
}


@pytest.mark.parametrize("change", DIFFERENT_ARRAYS.values(), ids=DIFFERENT_ARRAYS)
def test_arrays_that_do_not_make_a_trace_are_refused(path, change):
    path.write_bytes(npz_of(**WELL_FORMED | change))
    with pytest.raises(TraceError, match="not a trace"):
        load_trace(path)


@pytest.mark.parametrize("missing", WELL_FORMED)
def test_a_file_without_one_of_its_arrays_is_refused(path, missing):
    path.write_bytes(npz_of(**{k: v for k, v in WELL_FORMED.items() if k != missing}))
    with pytest.raises(TraceError, match=missing):
        load_trace(path)


NOT_A_TRACE = {
    "empty": b"",
    "text": b"experts,offsets\n1,2\n",
    "an array alone": npy_of(EXPERTS),
    "the beginning of a zip": npz_of(**WELL_FORMED)[:300],
    "a zip of something else": zip_of(readme=b"hello"),
    "a zip of text": zip_of(**{"experts.npy": b"hello", "offsets.npy": b"hello"}),
    "an encrypted zip": encrypted(npz_of(**WELL_FORMED)),
    "a zip with less in it than it says": zip_of(**{"experts.npy": header_of(1 << 50, 3, 2)}),
    "a pickle": b"\x80\x04K\x01.",
}


@pytest.mark.parametrize("content", NOT_A_TRACE.values(), ids=NOT_A_TRACE)
def test_a_file_that_is_not_a_trace_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(TraceError, match="not a trace"):
        load_trace(path)


def test_a_damaged_file_is_refused_or_read_right_and_fails_no_other_way(path):
    """One byte of a compressed trace is another one: the routing is never silently different."""
    original = [sequence(20)]
    save_trace(path, original, num_experts=8)
    content = path.read_bytes()
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            (loaded,) = load_trace(path).sequences
        except TraceError:
            continue
        np.testing.assert_array_equal(loaded.experts_TLK, original[0].experts_TLK)


def test_a_file_that_does_not_exist_is_a_trace_error(path):
    with pytest.raises(TraceError, match="No such file"):
        load_trace(path)


@pytest.mark.parametrize(
    "texts",
    ['{"generated_tokens": ["a", "b"]}', "[]\n[]", "{\n}", '{"generated_tokens": 3}\n{}', ""],
)
def test_texts_that_do_not_belong_to_the_trace_give_no_token_ids(path, texts):
    np.savez(path, experts=sequence(5).experts_TLK, offsets=OFFSETS)
    path.with_name("sequences.jsonl").write_text(texts)
    for loaded in load_trace(path).sequences:
        assert (loaded.token_ids_T == -1).all()


NO_ROUTING = {
    "an expert twice for a token": {"experts": np.zeros((5, NUM_LAYERS, TOP_K), int)},
    "a negative expert": {"experts": sequence(5).experts_TLK.astype(np.int64) - 9},
    "no experts per token": {"experts": np.zeros((5, NUM_LAYERS, 0), int), "num_experts": 8},
    "more experts than any model has": {"num_experts": 10**12},
    "a number of experts in words": {"num_experts": "eight"},
    "an infinite number of experts": {"num_experts": np.inf},
    "steps that fall within a sequence": {"steps": np.array([1, 0, 2, 3, 4])},
    "steps that are no numbers": {"steps": np.full(5, np.nan)},
    "token ids in words": {"token_ids": np.array(list("abcde"))},
    "prefill in words": {"is_prefill": np.array(list("abcde"))},
}


@pytest.mark.parametrize("change", NO_ROUTING.values(), ids=NO_ROUTING)
def test_what_no_run_can_have_recorded_is_refused(path, change):
    whole: dict[str, Any] = {"experts": sequence(5).experts_TLK, "offsets": OFFSETS}
    np.savez(path, **whole)
    assert len(load_trace(path).sequences) == 2
    np.savez(path, **whole | change)
    with pytest.raises(TraceError, match="do not belong together"):
        load_trace(path)


def test_steps_may_fall_from_one_sequence_to_the_next(path):
    """Sequences of one batch share steps, and lie one after the other in the file."""
    steps = np.array([0, 1, 0, 1, 2])
    np.savez(path, experts=sequence(5).experts_TLK, offsets=OFFSETS, steps=steps)
    assert [s.steps_T.tolist() for s in load_trace(path).sequences] == [[0, 1], [0, 1, 2]]
