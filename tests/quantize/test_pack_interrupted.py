"""`moe-infinity pack` refuses what it cannot pack and what is in its way; wherever it is killed, it
goes on to the same bytes.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_infinity import CheckpointError, ConfigError, UnsupportedModelError
from tests import conftest, safetensors_file
from tests.quantize.packed_checkpoints import (
    SHARD_BYTES,
    everything_in,
    make_source,
    pack,
    save_random,
)

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Read-only."""
    return make_source(tmp_path_factory.mktemp("pack") / "source")


# Refusals


def test_groups_that_do_not_fit_are_refused_with_what_would(tmp_path):
    source = tmp_path / "source"
    conftest.make_model(hidden_size=64, moe_intermediate_size=100).save_pretrained(source)
    with pytest.raises(UnsupportedModelError, match=r"down_proj.weight \[64, 100\]") as refused:
        pack(source, tmp_path / "out", experts="int4", group_size=64)
    assert "int8 or fp8" in str(refused.value)
    assert os.listdir(tmp_path) == ["source"]


def test_a_quantized_checkpoint_is_refused(source, tmp_path):
    pack(source, tmp_path / "packed")
    with pytest.raises(UnsupportedModelError, match="quantized already"):
        pack(tmp_path / "packed", tmp_path / "out")


@pytest.mark.parametrize(
    "wrong", [{"experts": "int3"}, {"experts": "int4", "group_size": 48}, {"rounding": "up"}]
)
def test_unknown_options_are_refused(wrong, source, tmp_path):
    with pytest.raises(ConfigError, match="expected one of"):
        pack(source, tmp_path / "out", **wrong)


@pytest.mark.parametrize("name", ["out", "out.partial"])
def test_what_is_there_already_is_not_touched(name, source, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "thesis.txt").write_text("of years")
    with pytest.raises(ConfigError, match="there already"):
        pack(source, tmp_path / "out")
    assert everything_in(tmp_path) == {f"{name}/thesis.txt": b"of years"}


def test_a_finished_folder_is_not_written_again(source, tmp_path):
    (tmp_path / "out").mkdir()  # empty
    pack(source, tmp_path / "out")
    written = everything_in(tmp_path)
    with pytest.raises(ConfigError, match="there already"):
        pack(source, tmp_path / "out")
    assert everything_in(tmp_path) == written


def test_a_folder_inside_the_checkpoint_is_refused(source):
    with pytest.raises(ConfigError, match="inside"):
        pack(source, source / "out")


def test_a_truncated_source_is_refused_and_nothing_is_written(source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "source")
    file = broken / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match="truncated"):
        pack(broken, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("value", [0x7FC0, 0x7F80])  # NaN, infinity
def test_a_weight_that_is_no_number_is_refused_by_name(value, source, tmp_path):
    broken = shutil.copytree(source, tmp_path / "source")

    def spoil(tensors: dict[str, Any]) -> None:
        dtype, shape, raw = tensors[EXPERT]
        tensors[EXPERT] = dtype, shape, raw[:-2] + value.to_bytes(2, "little")

    safetensors_file.rebuild(broken / "model.safetensors", spoil)
    with pytest.raises(CheckpointError, match=EXPERT):
        pack(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}
DBRX = {
    "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
    "d_model": 64, "n_heads": 4, "n_layers": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "sizes", "said"),
    [("GptOss", GPT_OSS, "transposed"), ("Dbrx", DBRX, "one below the other")],
)
def test_layouts_that_scales_per_row_do_not_suit_are_refused(architecture, sizes, said, tmp_path):
    source = save_random(architecture, tmp_path / "source", **sizes)
    with pytest.raises(UnsupportedModelError, match=said):
        pack(source, tmp_path / "out")
    assert os.listdir(tmp_path) == ["source"]


# Interruptions


def test_a_full_disk_is_told_and_the_same_command_goes_on(source, tmp_path, monkeypatch):
    pwrite, room = os.pwrite, 150_000

    def no_room(descriptor: int, data: Any, offset: int) -> int:
        nonlocal room
        room -= len(data)
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", no_room)
        with pytest.raises(CheckpointError, match="disk is full") as told:
            pack(source, tmp_path / "out")
    assert "goes on" in str(told.value)
    assert not (tmp_path / "out").exists()
    pack(source, tmp_path / "out")
    pack(source, tmp_path / "expected")
    assert everything_in(tmp_path / "out") == everything_in(tmp_path / "expected")


def test_where_nothing_can_be_written_another_folder_is_wanted(source, tmp_path, monkeypatch):
    def refuse(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(CheckpointError, match="cannot be written") as told:
        pack(source, tmp_path / "out")
    assert "name another folder with -o" in str(told.value)


def test_too_little_room_is_told_before_anything_is_written(source, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="to write, 1000 B free"):
        pack(source, tmp_path / "out")
    assert not list(tmp_path.rglob("*.safetensors*"))


def interrupted(source: Path, folder: Path, **options: Any) -> None:
    """A run that is stopped in its third shard."""

    def stop(done: int, total: int) -> None:
        if done > 3 * SHARD_BYTES:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source, folder, on_bytes=stop, **options)
    assert not folder.exists()


def test_finished_shards_are_not_written_again(source, tmp_path):
    interrupted(source, tmp_path / "out")
    before = {f.name: f.stat().st_mtime_ns for f in tmp_path.glob("out.partial/*.safetensors")}
    assert len(before) >= 2
    pack(source, tmp_path / "out")
    for name, time_ns in before.items():
        assert (tmp_path / "out" / name).stat().st_mtime_ns == time_ns


def test_a_finished_shard_that_was_changed_is_written_again(source, tmp_path):
    interrupted(source, tmp_path / "out")
    shard = min(tmp_path.glob("out.partial/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\1")
    pack(source, tmp_path / "out")
    pack(source, tmp_path / "expected")
    assert everything_in(tmp_path / "out") == everything_in(tmp_path / "expected")


@pytest.mark.parametrize("what", ["options", "source"])
def test_an_interrupted_run_of_something_else_is_refused(what, source, tmp_path):
    copy = shutil.copytree(source, tmp_path / "source")
    interrupted(copy, tmp_path / "out")
    if what == "source":
        os.utime(copy / "model.safetensors")
    with pytest.raises(ConfigError, match="interrupted run"):
        pack(copy, tmp_path / "out", experts="fp8" if what == "options" else "int8")


def test_two_runs_at_once_are_refused(source, tmp_path):
    is_refused = False

    def run_another(done: int, total: int) -> None:
        nonlocal is_refused
        if not is_refused:
            with pytest.raises(ConfigError, match="another process"):
                pack(source, tmp_path / "out")
        is_refused = True

    pack(source, tmp_path / "out", on_bytes=run_another)
    assert is_refused


# Runs the packer in forks, as its imports take seconds, and kills them before call N of those that
# write. With one thread: a fork has none of torch's others, and would wait for them forever.
# {"source", "folder", "shard_bytes", "kills": [[N, ...], ...]}: each list is a folder made in so
# many runs; N below 1 counts from the end of an uninterrupted run.
KILLER = """
import json, os, signal, sys
from pathlib import Path
import torch
from moe_infinity.quantize.pack import pack_checkpoint

torch.set_num_threads(1)
job = json.loads(sys.argv[1])
count, last = 0, None

def counting(call):
    def counted(*args, **kwargs):
        global count
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)
    return counted

def run(folder):
    pack_checkpoint(
        job["source"], Path(folder), experts="int4", shard_bytes=job["shard_bytes"]
    )

for name in ("pwrite", "fsync", "replace", "ftruncate", "unlink", "mkdir"):
    setattr(os, name, counting(getattr(os, name)))
run(job["folder"] + "expected")
num_calls, num_killed = count, 0
for number, kills in enumerate(job["kills"]):
    folder = Path(job["folder"] + str(number))
    for at in kills:
        count, last = 0, at if at > 0 else num_calls + at
        pid = os.fork()
        if not pid:
            run(folder)
            os._exit(0)
        num_killed += os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    last = None
    if not folder.exists() or Path(f"{folder}.progress.json").exists():
        run(folder)
print(num_killed)
"""


def check_killed(source: Path, folder: Path, kills: list[list[int]], *, at_least: int) -> None:
    """Make folders in runs killed before these calls; all are to be those of an uninterrupted run.
    At least so many runs are to be killed: a later one has less to do and may end before that."""
    job = {"source": str(source), "folder": f"{folder}/", "shard_bytes": SHARD_BYTES}
    args = [sys.executable, "-c", KILLER, json.dumps(job | {"kills": kills})]
    done = subprocess.run(args, capture_output=True, text=True, check=True, timeout=500)
    assert int(done.stdout) >= at_least
    names = {path.name for path in folder.iterdir()}
    assert names == {"expected", *(str(number) for number in range(len(kills)))}
    expected = everything_in(folder / "expected")
    for number in range(len(kills)):
        assert everything_in(folder / str(number)) == expected, kills[number]


@pytest.mark.slow
def test_killed_at_ten_moments_it_goes_on_to_the_same_bytes(source, tmp_path):
    kills = [1, 2, 3, 5, 40, 100, 30, 60, 20, 10]
    check_killed(source, tmp_path, [kills], at_least=10)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_before_any_of_its_last_calls_it_goes_on_to_the_same_bytes(source, tmp_path):
    kills = [[-call] for call in range(50)]
    check_killed(source, tmp_path, kills, at_least=48)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_does_not_grow_with_the_checkpoint(source, hollow_checkpoint, tmp_path):
    """hollow_checkpoint is 390 MiB, and an expert 12."""
    code = (
        "import resource, sys; from pathlib import Path;"
        "from moe_infinity.quantize.pack import pack_checkpoint;"
        "pack_checkpoint(sys.argv[1], Path(sys.argv[2]), experts='int4');"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for number, checkpoint in enumerate((source, hollow_checkpoint)):
        args = [sys.executable, "-c", code, str(checkpoint), str(tmp_path / str(number))]
        done = subprocess.run(args, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) << 10)
    assert peaks[1] - peaks[0] < 64 << 20


@pytest.mark.parametrize("wrong", [["--experts", "int2"], ["--experts", "int4", "--rounding", "x"]])
def test_the_command_refuses_unknown_options(command, source, tmp_path, wrong):
    outcome = command("pack", source, *wrong, "-o", tmp_path / "out")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said("expected one of")
