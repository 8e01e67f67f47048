"""A disk that fails in the middle of a generation or is full while a trace is written, and Ctrl-C:
an error that names the file, in bounded time, and nothing half done is left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_infinity import CheckpointError, MoE, TraceError
from moe_infinity.tools.tracing import record_trace

pytestmark = pytest.mark.timeout(30)
BYTES_PER_EXPERT = 3 * 32 * 16 * 2
INPUTS = {"input_ids": torch.tensor([[5, 6, 9]]), "attention_mask": torch.ones(1, 3).long()}


def tokens_of(moe: MoE, **kwargs: Any) -> list[int]:
    arguments = {**INPUTS, "do_sample": False, "max_new_tokens": 12} | kwargs
    return [int(token_id) for token_id in moe.generate(**arguments)[0]]


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


@pytest.fixture
def broken(copy_of: Callable[[Path], Path], tiny_checkpoint: Path) -> Path:
    """A copy of the single-file checkpoint, still whole: the test breaks it."""
    return copy_of(tiny_checkpoint)


# a disk that fails in the middle of a generation


def after_tokens(number: int, act: Callable[[], object]) -> list[Callable[..., torch.Tensor]]:
    """A stopping criterion that stops nothing, and acts once, after so many tokens."""

    def criterion(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if ids.shape[1] == 3 + number:
            act()
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    return [criterion]


@pytest.fixture
def expected(resident_model: MoE) -> list[int]:
    return tokens_of(resident_model)


def test_a_file_truncated_during_generation_is_named_and_works_again_once_restored(
    broken, expected
):
    file, whole = weights(broken), weights(broken).read_bytes()
    with MoE(broken, host_memory=BYTES_PER_EXPERT) as moe:
        cut = after_tokens(4, lambda: os.truncate(file, 2000))
        with pytest.raises(CheckpointError, match="model.safetensors"):
            tokens_of(moe, stopping_criteria=cut)
        moe.check_invariants()
        file.write_bytes(whole)
        assert tokens_of(moe) == expected


def test_a_file_truncated_during_generation_and_then_replaced_works_again(broken, expected):
    """A second download or `mv` gives the name a new inode."""
    file, spare = weights(broken), broken / "spare"
    shutil.copyfile(file, spare)
    with MoE(broken, host_memory=BYTES_PER_EXPERT) as moe:
        cut = after_tokens(4, lambda: os.truncate(file, 2000))
        with pytest.raises(CheckpointError, match="model.safetensors"):
            tokens_of(moe, stopping_criteria=cut)
        spare.replace(file)
        assert tokens_of(moe) == expected


@pytest.mark.parametrize("host_memory", [BYTES_PER_EXPERT, "25%", "50%"])
def test_a_disk_that_fails_during_generation_is_an_error_and_may_recover(
    tiny_checkpoint, expected, monkeypatch, host_memory
):
    def fail(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with MoE(tiny_checkpoint, host_memory=host_memory) as moe:
        broken_disk = after_tokens(2, lambda: monkeypatch.setattr(os, "preadv", fail))
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*Input/output"):
            tokens_of(moe, stopping_criteria=broken_disk)
        moe.check_invariants()
        monkeypatch.undo()
        assert tokens_of(moe) == expected
        moe.check_invariants()


def test_reads_that_fail_now_and_then_never_give_wrong_tokens(
    tiny_checkpoint, expected, monkeypatch
):
    preadv, calls = os.preadv, iter(range(1_000_000))

    def flaky(*args: Any) -> int:
        if next(calls) % 50 == 49:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*args)

    with MoE(tiny_checkpoint, host_memory="25%") as moe:
        monkeypatch.setattr(os, "preadv", flaky)
        outcomes = []
        for _ in range(15):
            try:
                outcomes.append(tokens_of(moe) == expected)
            except CheckpointError:
                moe.check_invariants()
        monkeypatch.undo()
        assert all(outcomes)
        assert len(outcomes) < 15
        assert tokens_of(moe) == expected


def test_shards_removed_after_loading_give_right_tokens_or_an_error(
    copy_of, sharded_checkpoint, expected, tmp_path
):
    folder = copy_of(sharded_checkpoint)
    with MoE(folder, host_memory="25%") as moe:
        away = folder.rename(tmp_path / "away")
        with contextlib.suppress(CheckpointError):  # files not opened before cannot be opened now
            assert tokens_of(moe) == expected
        away.rename(folder)
        assert tokens_of(moe) == expected


def test_a_failing_disk_ends_a_stream_with_the_error(broken, expected):
    file, whole = weights(broken), weights(broken).read_bytes()
    with MoE(broken, host_memory=BYTES_PER_EXPERT) as moe:
        stream = moe.stream(
            INPUTS, do_sample=False, max_new_tokens=50,
            stopping_criteria=after_tokens(4, lambda: os.truncate(file, 2000)),
        )  # fmt: skip
        with pytest.raises(CheckpointError, match="model.safetensors"):
            list(stream)
        assert stream.token_ids == expected[3:7]
        file.write_bytes(whole)
        assert tokens_of(moe) == expected


def test_threads_that_cannot_be_started_never_give_wrong_tokens(
    tiny_checkpoint, expected, monkeypatch
):
    def no_thread(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    with MoE(tiny_checkpoint, host_memory="50%") as moe:
        with monkeypatch.context() as patch:
            patch.setattr("moe_infinity.memory.threads.ReadThreads.submit", no_thread)
            with pytest.raises(RuntimeError, match="new thread"):
                tokens_of(moe)
        assert tokens_of(moe) == expected
        moe.check_invariants()


# a generation that is interrupted


def interrupted_at(event: int, act: Callable[[], object]) -> int:
    """Ctrl-C when so many lines of our bookkeeping have run. Gives how many had run at the end."""
    seen = 0

    def trace(frame: Any, kind: str, arg: Any) -> Any:
        nonlocal seen
        if Path(frame.f_code.co_filename).stem not in ("residency", "mover", "runtime"):
            return None
        seen += kind == "line"
        if kind == "line" and seen == event:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            act()
    finally:
        sys.settrace(before)
    return seen


@pytest.mark.parametrize("every", [401, pytest.param(101, marks=pytest.mark.slow)])
def test_an_interrupted_generation_never_harms_the_next(tiny_checkpoint, expected, every):
    """Ctrl-C in a notebook may come anywhere: between two lines of ours, and again and again."""
    with MoE(tiny_checkpoint, host_memory="25%") as moe:
        num_lines = interrupted_at(-1, lambda: tokens_of(moe, max_new_tokens=2))
        for event in range(5, num_lines, every):
            interrupted_at(event, lambda: tokens_of(moe, max_new_tokens=2))
            assert tokens_of(moe, max_new_tokens=3) == expected[:6], f"interrupted at line {event}"
        moe.check_invariants()


# a disk that is full while a trace is written


@contextmanager
def no_file_longer_than(num_bytes: int) -> Iterator[None]:
    """The kernel refuses to write past this, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def only_old_trace_is_left(folder: Path) -> None:
    assert [file.name for file in folder.iterdir()] == ["out.npz"]
    assert (folder / "out.npz").read_bytes() == b"the old trace"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where a trace goes; an old one is there."""
    file = tmp_path / "traces" / "out.npz"
    file.parent.mkdir()
    file.write_bytes(b"the old trace")
    return file


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numpy < 2.2
@pytest.mark.parametrize("num_bytes", [0, 64, 700])
def test_a_disk_full_for_real_while_a_trace_is_written_keeps_the_old_file(
    tiny_checkpoint, out, num_bytes
):
    with (
        MoE(tiny_checkpoint, host_memory="50%") as moe,
        pytest.raises(TraceError, match=r"out\.npz"),
        no_file_longer_than(num_bytes),
    ):
        record_trace(moe, ["w5 w6", "w7"], out, max_new_tokens=8)
    only_old_trace_is_left(out.parent)


def test_a_disk_full_at_the_last_moment_keeps_the_old_file(tiny_checkpoint, out, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with (
        MoE(tiny_checkpoint, host_memory="50%") as moe,
        pytest.raises(TraceError, match=r"out\.npz.*No space left"),
    ):
        record_trace(moe, ["w5 w6"], out, max_new_tokens=4)
    only_old_trace_is_left(out.parent)


def test_a_checkpoint_that_fails_while_tracing_keeps_the_old_file(broken, out):
    with MoE(broken, host_memory=BYTES_PER_EXPERT) as moe:
        with pytest.raises(CheckpointError):
            record_trace(
                moe,
                ["w5 w6", "w7 w8"],
                out,
                max_new_tokens=4,
                on_prompt=lambda done, total: os.truncate(weights(broken), 2000) if done else None,
            )
        only_old_trace_is_left(out.parent)


def test_a_trace_into_a_folder_that_does_not_exist_is_refused_before_generating(
    tiny_checkpoint, tmp_path
):
    with MoE(tiny_checkpoint, host_memory="50%") as moe:
        with pytest.raises(TraceError, match="no_such_folder"):
            record_trace(moe, ["w5"], tmp_path / "no_such_folder" / "out.npz", max_new_tokens=4)
        assert moe.report().prefill.steps == 0


def test_recording_again_after_a_failed_recording_works(tiny_checkpoint, tmp_path):
    with MoE(tiny_checkpoint, host_memory="50%") as moe:
        with pytest.raises(RuntimeError, match="of the caller"), moe.recording():
            raise RuntimeError("of the caller")
        assert record_trace(moe, ["w5 w6"], tmp_path / "t.npz", max_new_tokens=4) == (1, 2 + 3)
