"""What goes wrong in the world ends in one of our errors: it names what was found, comes in bounded
time, and leaves nothing half done. Every case of the contract, through the front door."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from moe_infinity import (
    CheckpointError,
    ConfigError,
    MoE,
    MoEInfinityError,
    TraceError,
    UnsupportedModelError,
    cli,
)
from moe_infinity.inspection import inspect_checkpoint
from moe_infinity.memory.machine import machine_memory_bytes
from moe_infinity.tracing import record_trace
from tests import safetensors_file

pytestmark = pytest.mark.timeout(30)
BYTES_PER_EXPERT = 3 * 32 * 16 * 2
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
DENSE = "model.layers.1.self_attn.q_proj.weight"
INPUTS = {"input_ids": torch.tensor([[5, 6, 9]]), "attention_mask": torch.ones(1, 3).long()}


def tokens_of(moe: MoE, **kwargs: Any) -> list[int]:
    ids = moe.generate(**INPUTS, do_sample=False, max_new_tokens=12, **kwargs)
    return [int(token_id) for token_id in ids[0]]


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def broken(copy_of: Callable[[Path], Path], tiny_checkpoint: Path) -> Path:
    """A copy of the single-file checkpoint, still whole: the test breaks it."""
    return copy_of(tiny_checkpoint)


def refused(folder: Path, kind: type[MoEInfinityError], *said: str) -> None:
    """Loading and inspecting both fail with an error of this kind that says these things."""
    for use in (lambda: MoE(folder, host_memory="50%"), lambda: inspect_checkpoint(str(folder))):
        with pytest.raises(kind) as caught:
            use()
        for text in said:
            assert text in str(caught.value)


# files that are missing or cut


def test_a_missing_shard_is_named(copy_of, sharded_checkpoint):
    folder = copy_of(sharded_checkpoint)
    lost = sorted(folder.glob("*.safetensors"))[1]
    lost.unlink()
    refused(folder, CheckpointError, lost.name)


def test_a_truncated_shard_is_named_with_both_sizes(copy_of, sharded_checkpoint):
    folder = copy_of(sharded_checkpoint)
    cut = sorted(folder.glob("*.safetensors"))[1]
    size = cut.stat().st_size
    os.truncate(cut, size - 100)
    refused(folder, CheckpointError, cut.name, "truncated", str(size), str(size - 100))


@pytest.mark.parametrize("size", [0, 4, 100])
def test_a_file_cut_inside_its_header_is_named(broken, size):
    os.truncate(weights(broken), size)
    refused(broken, CheckpointError, "model.safetensors")


def test_a_folder_without_weights_is_refused(broken):
    weights(broken).unlink()
    refused(broken, CheckpointError, str(broken))


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    refused(tmp_path / "nothing_here", CheckpointError, "nothing_here")


def test_a_file_given_for_a_folder_is_refused(broken):
    refused(weights(broken), CheckpointError, "model.safetensors")


def test_a_hub_id_that_is_not_on_this_machine_is_refused_without_a_network():
    refused(Path("nobody/no-such-model"), CheckpointError, "nobody/no-such-model")


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\x01"])
def test_a_config_that_is_no_json_object_is_refused(broken, text):
    (broken / "config.json").write_text(text)
    refused(broken, MoEInfinityError, "config.json")


def test_a_folder_without_a_config_is_refused(broken):
    (broken / "config.json").unlink()
    refused(broken, MoEInfinityError, "config.json")


def test_weights_as_pickles_are_refused(broken):
    weights(broken).unlink()
    torch.save({"a": torch.ones(1)}, broken / "pytorch_model.bin")
    refused(broken, MoEInfinityError, "safetensors")


# headers that lie


def move_beyond_the_file(header: dict[str, Any]) -> None:
    begin, end = header[EXPERT]["data_offsets"]
    header[EXPERT]["data_offsets"] = [begin + (1 << 40), end + (1 << 40)]


def overlap_the_neighbour(header: dict[str, Any]) -> None:
    begin, end = header[EXPERT]["data_offsets"]
    header[EXPERT]["data_offsets"] = [begin - 64, end - 64]


def claim_a_larger_shape(header: dict[str, Any]) -> None:
    header[EXPERT]["shape"] = [17, 32]


def claim_another_dtype(header: dict[str, Any]) -> None:
    header[EXPERT]["dtype"] = "F32"


def claim_no_dtype_we_know(header: dict[str, Any]) -> None:
    header[EXPERT]["dtype"] = "F33"


@pytest.mark.parametrize(
    "lie",
    [
        move_beyond_the_file,
        overlap_the_neighbour,
        claim_a_larger_shape,
        claim_another_dtype,
        claim_no_dtype_we_know,
    ],
)
def test_a_header_that_lies_is_refused_with_file_and_tensor(broken, lie):
    safetensors_file.edit_header(weights(broken), lie)
    refused(broken, CheckpointError, "model.safetensors", "model.layers.1.mlp.experts.3")


def test_a_header_longer_than_the_file_is_refused(broken):
    raw = weights(broken).read_bytes()
    weights(broken).write_bytes(struct.pack("<Q", 1 << 40) + raw[8:])
    refused(broken, CheckpointError, "model.safetensors")


# tensors that do not fit the model


def replace(name: str, shape: list[int]) -> Callable[[dict[str, Any]], None]:
    """A tensor of another shape, with a header that tells the truth about it."""

    def edit(tensors: dict[str, Any]) -> None:
        tensors[name] = ("BF16", shape, bytes(2 * int(np.prod(shape))))

    return edit


def test_an_expert_of_another_shape_than_its_neighbours_is_refused(broken):
    safetensors_file.rebuild(weights(broken), replace(EXPERT, [8, 64]))
    refused(broken, CheckpointError, EXPERT, "[8, 64]")


def test_experts_of_another_shape_than_the_model_wants_are_refused(broken):
    edit_config(broken, moe_intermediate_size=24)
    refused(broken, CheckpointError, "experts", "24", "16")


def test_a_dense_tensor_of_another_shape_is_refused(broken):
    safetensors_file.rebuild(weights(broken), replace(DENSE, [16, 64]))
    with pytest.raises(CheckpointError, match=r"q_proj"):
        MoE(broken, host_memory="50%")


def test_a_missing_expert_is_refused(broken):
    safetensors_file.rebuild(weights(broken), lambda tensors: tensors.pop(EXPERT))
    refused(broken, CheckpointError, "model.layers.1.mlp.experts")


def test_a_missing_row_of_experts_is_refused(broken):
    def without_layer_1(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "layers.1.mlp.experts" in name]:
            del tensors[name]

    safetensors_file.rebuild(weights(broken), without_layer_1)
    refused(broken, CheckpointError, "model.layers.1.mlp.experts")


def test_more_experts_than_the_model_has_are_refused(broken):
    edit_config(broken, num_local_experts=4)
    refused(broken, CheckpointError, "experts", "4", "8")


def test_a_missing_dense_tensor_is_refused_rather_than_made_up(broken):
    """transformers would warn and fill it with random numbers: tokens without meaning."""
    safetensors_file.rebuild(weights(broken), lambda tensors: tensors.pop(DENSE))
    with pytest.raises(CheckpointError, match=r"q_proj"):
        MoE(broken, host_memory="50%")


# models of another kind


def test_a_dense_model_is_refused_with_what_to_use_instead(tmp_path):
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    refused(tmp_path, UnsupportedModelError, "no routed experts", "transformers")


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "from_the_future", "architectures": ["FromTheFutureForCausalLM"]},
        {"model_type": None, "architectures": None},
    ],
)
def test_an_unknown_architecture_is_refused(broken, changes):
    edit_config(broken, **changes)
    refused(broken, UnsupportedModelError, str(broken))


def test_a_model_that_writes_no_text_is_refused(broken):
    edit_config(broken, model_type="vit", architectures=["ViTModel"])
    refused(broken, UnsupportedModelError, "ViTModel")


def test_a_quantized_checkpoint_is_refused_with_its_method(broken):
    edit_config(broken, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModelError, match="fp8"):
        MoE(broken, host_memory="50%")


# budgets and options


@pytest.mark.parametrize("host_memory", [0, BYTES_PER_EXPERT - 1, "1KiB", "1%"])
def test_a_budget_below_one_expert_is_refused_with_what_one_takes(tiny_checkpoint, host_memory):
    with pytest.raises(ConfigError, match=r"3\.0 KiB.*\n.*host_memory"):
        MoE(tiny_checkpoint, host_memory=host_memory)


def test_a_budget_of_one_expert_is_enough(tiny_checkpoint, stock_model):
    expected = stock_model.generate(**INPUTS, do_sample=False, max_new_tokens=12)[0]
    with MoE(tiny_checkpoint, host_memory=BYTES_PER_EXPERT) as moe:
        assert tokens_of(moe) == expected.tolist()


@pytest.mark.parametrize("host_memory", [1 << 62, "4000TiB", 2 * machine_memory_bytes()])
def test_a_budget_larger_than_the_machine_is_refused(tiny_checkpoint, host_memory):
    with pytest.raises(ConfigError, match="machine"):
        MoE(tiny_checkpoint, host_memory=host_memory)


def test_an_unknown_option_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"hots_memory.*host_memory"):
        MoE(tmp_path / "not looked at", hots_memory="1GiB")


def test_a_refused_model_leaves_no_file_open(sharded_checkpoint):
    with pytest.raises(ConfigError):
        MoE(sharded_checkpoint, host_memory=1)
    links = [link for link in Path("/proc/self/fd").iterdir() if link.exists()]
    files = [os.readlink(link) for link in links]
    assert not [file for file in files if str(sharded_checkpoint) in file]


# a disk that fails in the middle of a generation


def after_tokens(number: int, act: Callable[[], object]) -> list[Callable[..., torch.Tensor]]:
    """A stopping criterion that stops nothing, and acts once, after so many tokens."""

    def criterion(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if ids.shape[1] == 3 + number:
            act()
        return torch.zeros(ids.shape[0], dtype=torch.bool)

    return [criterion]


@pytest.fixture
def expected(stock_model: Any) -> list[int]:
    ids: list[int] = stock_model.generate(**INPUTS, do_sample=False, max_new_tokens=12)[0].tolist()
    return ids


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


def test_every_second_read_failing_never_gives_wrong_tokens(tiny_checkpoint, expected, monkeypatch):
    preadv, calls = os.preadv, iter(range(1_000_000))

    def flaky(*args: Any) -> int:
        if next(calls) % 50 == 49:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(*args)

    with MoE(tiny_checkpoint, host_memory="25%") as moe:
        monkeypatch.setattr(os, "preadv", flaky)
        outcomes = []
        for _ in range(30):
            try:
                outcomes.append(tokens_of(moe) == expected)
            except CheckpointError:
                moe.check_invariants()
        monkeypatch.undo()
        assert all(outcomes)
        assert len(outcomes) < 30
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
            patch.setattr("concurrent.futures.ThreadPoolExecutor.submit", no_thread)
            with pytest.raises(RuntimeError, match="new thread"):
                tokens_of(moe)
        assert tokens_of(moe) == expected
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
                on_prompt=lambda: os.truncate(weights(broken), 2000),
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


# the command line says the same, on stderr, with code 1


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: weights(folder).unlink(), "safetensors"),
        (lambda folder: os.truncate(weights(folder), 5000), "truncated"),
        (
            lambda folder: safetensors_file.edit_header(weights(folder), overlap_the_neighbour),
            "model.layers.1.mlp.experts.3",
        ),
        (lambda folder: edit_config(folder, moe_intermediate_size=24), "experts"),
        (
            lambda folder: safetensors_file.rebuild(weights(folder), replace(DENSE, [16, 64])),
            "q_proj",
        ),
        (lambda folder: edit_config(folder, model_type="from_the_future"), "from_the_future"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer"),
        (lambda folder: shutil.rmtree(folder), "tiny"),
    ],
    ids=[
        "missing weights", "truncated", "lying header", "experts of wrong shape",
        "dense tensor of wrong shape", "unknown architecture", "missing tokenizer",
        "broken tokenizer", "missing folder",
    ],
)  # fmt: skip
def test_the_command_line_answers_a_broken_checkpoint_with_one_message_and_code_1(
    broken, monkeypatch, capsys, break_it, said
):
    break_it(broken)
    argv = ["moe-infinity", "run", str(broken), "-p", "w5", "--host-memory", "50%", "--json"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    captured = capsys.readouterr()
    assert (stopped.value.code, captured.out) == (1, "")
    assert said in captured.err.replace("\n", "")
    assert "Traceback" not in captured.err
