"""Experts that all fit compute where the page cache has them, with the bits of copied ones."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.checkpoint import expert_loader, layer_recipes
from moe_infinity.checkpoint.files import MappedFile, OpenFile
from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.engine import engine
from moe_infinity.engine.preloader import start_turns
from moe_infinity.errors import CheckpointError
from moe_infinity.experts import ExpertKey, MappedExpert
from moe_infinity.kernels.cpu.bus_errors import bus_errors
from moe_infinity.memory.slots import MappedSlots
from moe_infinity.system import linux
from tests.closeness import logits_of_steps
from tests.gguf_files import build
from tests.gguf_models import WIDE
from tests.on_demand import ON_DEMAND
from tools.convert_to_gguf import convert

IDS = torch.arange(3, 15).view(1, 12)


@pytest.fixture(autouse=True)
def small_models_are_mapped(monkeypatch):
    monkeypatch.setattr(expert_loader, "MIN_MAPPED_BYTES", 0)


@pytest.fixture(scope="module")
def can_map(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("probe") / "file"
    file.write_bytes(b"1")
    try:
        MappedFile(OpenFile(file)).populate(0, 1)
    except OSError as error:
        pytest.skip(f"this system cannot map files: {error}")


def slots_of(moe: MoE) -> Any:
    return moe.engine.tiers[-1].slots


def computed(folder: Path, **options: Any) -> tuple[Tensor, bool]:
    """Logits after a prompt and twelve tokens, and whether experts were mapped."""
    with MoE(folder, **options) as moe, torch.no_grad():
        is_mapped = isinstance(slots_of(moe), MappedSlots)
        assert ("in the page cache" in moe.report().experts) == is_mapped
        return logits_of_steps(moe.model, IDS), is_mapped


@pytest.mark.usefixtures("can_map")
@pytest.mark.parametrize("is_exact", [False, True])
def test_mapped_experts_have_the_bits_of_copied_ones(tiny_checkpoint, is_exact, monkeypatch):
    mapped, is_mapped = computed(tiny_checkpoint, exact=is_exact)
    assert is_mapped
    monkeypatch.setattr(expert_loader, "MIN_MAPPED_BYTES", 1 << 40)
    copied, is_mapped = computed(tiny_checkpoint, exact=is_exact)
    assert not is_mapped
    assert torch.equal(mapped, copied)


def watched_places(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ExpertKey, MappedExpert | None]]:
    """Every expert that a slot is given to, and its place in a file, if it is used there."""
    asked = []
    mapped = expert_loader.ExpertLoader.mapped

    def watched(self: Any, key: ExpertKey) -> MappedExpert | None:
        asked.append((key, mapped(self, key)))
        return asked[-1][1]

    monkeypatch.setattr(expert_loader.ExpertLoader, "mapped", watched)
    return asked


@pytest.mark.usefixtures("can_map")
def test_a_parameter_in_two_files_is_copied_if_it_is_one_product(sharded_checkpoint, monkeypatch):
    monkeypatch.setattr(layer_recipes, "MIN_MAPPED_SHARE", 0.1)
    asked = watched_places(monkeypatch)
    assert computed(sharded_checkpoint)[1]
    assert None not in [place for _, place in asked]
    mapped, is_mapped = computed(sharded_checkpoint, exact=True)
    assert is_mapped
    assert {place is None for _, place in asked} == {True, False}
    with MoE(sharded_checkpoint, exact=True) as moe:
        recipes, num_experts = moe.engine.loader.recipes[0], len(moe.engine.bookkeeping.keys[0])
        num_mapped = recipes.num_mappable(num_experts)
        in_place = recipes.bytes_in_place(num_experts, 1 << 20)
    assert num_mapped > 0
    rest = (num_experts - num_mapped) << 20  # have slots of their own
    assert in_place == num_mapped * recipes.bytes_per_expert() + rest
    monkeypatch.setattr(expert_loader, "MIN_MAPPED_BYTES", 1 << 40)
    assert torch.equal(mapped, computed(sharded_checkpoint, exact=True)[0])


@pytest.mark.usefixtures("can_map")
@pytest.mark.parametrize("is_exact", [False, True])
def test_experts_whose_parts_lie_apart_have_the_bits_of_copied_ones(
    tmp_path, is_exact, monkeypatch
):
    """Exact are products with gate and up in one matrix, which are two in the file."""
    folder = build("qwen3_moe", tmp_path / "model", **WIDE)
    asked = watched_places(monkeypatch)
    plain = set() if is_exact else {0, 1}
    for wanted, layers in (("q8_0", {0, 1}), ("q4_k_m", {0, 1}), ("bf16", plain), ("f32", plain)):
        file = tmp_path / f"{wanted}.gguf"
        convert(folder, file, wanted)
        asked.clear()
        mapped, is_mapped = computed(file, exact=is_exact)
        assert is_mapped == bool(layers)
        assert {key.moe_layer_idx for key, place in asked if place is not None} == layers
        monkeypatch.setattr(expert_loader, "MIN_MAPPED_BYTES", 1 << 40)
        copied, is_mapped = computed(file, exact=is_exact)
        assert not is_mapped
        assert torch.equal(mapped, copied)
        monkeypatch.setattr(expert_loader, "MIN_MAPPED_BYTES", 0)


@pytest.mark.usefixtures("can_map")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_that_have_down_between_gate_and_up_are_mapped(tmp_path, dtype, monkeypatch):
    """As in files of Mixtral and MiniMax, whose weights are w1, w2 and w3."""
    folder = build("mixtral", tmp_path / "model", dtype=dtype)
    asked = watched_places(monkeypatch)
    mapped, is_mapped = computed(folder)
    assert is_mapped
    assert None not in [place for _, place in asked]
    assert not computed(folder, exact=True)[1]
    monkeypatch.setattr(expert_loader, "MIN_MAPPED_BYTES", 1 << 40)
    assert torch.equal(mapped, computed(folder)[0])


@pytest.mark.usefixtures("can_map")
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text"])
def test_experts_whose_rows_have_another_order_have_the_bits_of_copied_ones(
    name, tmp_path, is_exact, monkeypatch
):
    """gpt-oss takes rows of gate and up in turn, and has biases; both transpose."""
    folder = build(name, tmp_path / "model", **WIDE)
    file = tmp_path / "model.gguf"
    convert(folder, file, "mxfp4")
    asked = watched_places(monkeypatch)
    mapped, is_mapped = computed(file, exact=is_exact)
    assert is_mapped
    assert all(place is not None for _, place in asked)
    monkeypatch.setattr(expert_loader, "MIN_MAPPED_BYTES", 1 << 40)
    copied, is_mapped = computed(file, exact=is_exact)
    assert not is_mapped
    assert torch.equal(mapped, copied)


def test_experts_that_do_not_all_fit_or_are_packed_on_load_are_copied(tiny_checkpoint):
    assert not computed(tiny_checkpoint, host_memory="50%")[1]
    assert not computed(tiny_checkpoint, expert_dtype="int8")[1]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENODEV])
def test_without_such_a_system_call_experts_are_copied(tiny_checkpoint, code, monkeypatch):
    """EINVAL: of Linux before 5.14."""

    def refused(*args: Any) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(linux.libc(), "madvise", refused)
    assert not computed(tiny_checkpoint)[1]


@pytest.mark.usefixtures("can_map")
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_experts_that_the_page_cache_has_are_there_from_the_start(
    tiny_checkpoint, share, monkeypatch
):
    """No thread visits them. Those that it has in part, or not at all, are made present as ever."""
    expected, is_mapped = computed(tiny_checkpoint)
    assert is_mapped
    middle = share * (tiny_checkpoint / "model.safetensors").stat().st_size
    monkeypatch.setattr(linux, "is_cached", lambda _, at, num_bytes: at + num_bytes <= middle)
    found = []

    def look(*args: Any) -> Any:
        found.append(len(moe_engine.tiers[-1].table.resident_keys()))
        return start_turns(*args)

    monkeypatch.setattr(engine, "start_turns", look)
    with MoE(tiny_checkpoint, preload="off") as moe, torch.no_grad():
        moe_engine = moe.engine
        moe.preload()
        moe.check_invariants()
        assert torch.equal(logits_of_steps(moe.model, IDS), expected)
    num_experts = moe_engine.bookkeeping.total_experts
    assert {0.0: found == [0], 0.5: 0 < found[0] < num_experts, 1.0: found == [num_experts]}[share]
    assert moe_engine.tiers[-1].table.num_resident == num_experts


@pytest.mark.usefixtures("can_map")
def test_entering_experts_that_are_present_may_be_interrupted(tiny_checkpoint, monkeypatch):
    """The expert that was being entered is absent again in the next pass."""
    monkeypatch.setattr(linux, "is_cached", lambda *where: True)
    with MoE(tiny_checkpoint, preload="off") as moe, torch.no_grad():
        expected = logits_of_steps(moe.model, IDS)
    with MoE(tiny_checkpoint, preload="off") as moe, torch.no_grad():
        table, slots = moe.engine.tiers[-1].table, slots_of(moe)
        bytes_for = slots.bytes_for

        def interrupted(slot_id: int, key: ExpertKey) -> Any:
            if key.expert_idx == 4:
                raise KeyboardInterrupt
            return bytes_for(slot_id, key)

        monkeypatch.setattr(slots, "bytes_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            moe.preload()
        assert (table.num_resident, table.num_loading) == (4, 1)
        monkeypatch.undo()
        assert torch.equal(logits_of_steps(moe.model, IDS), expected)
        moe.preload()
        moe.check_invariants()
        assert table.num_free == table.num_loading == 0


@pytest.mark.usefixtures("can_map")
def test_experts_that_are_present_push_no_others_out(tiny_checkpoint, monkeypatch):
    """A head that took the experts of a lost host over has more of them than slots."""
    monkeypatch.setattr(linux, "is_cached", lambda *where: True)
    with MoE(tiny_checkpoint, preload="off") as moe:
        table = moe.engine.tiers[-1].table
        table.withdraw(3)
        moe.preload()
        assert (table.num_free, table.evictions) == (0, 0)


@pytest.mark.skipif(sys.platform == "linux", reason="Linux maps files")
def test_elsewhere_experts_are_copied(tiny_checkpoint):
    assert not computed(tiny_checkpoint)[1]


@pytest.mark.usefixtures("can_map")
def test_a_file_that_was_shortened_is_an_error_and_a_whole_one_is_used_again(
    tiny_checkpoint, tmp_path
):
    folder = tmp_path / "copy"
    shutil.copytree(tiny_checkpoint, folder)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    with MoE(folder, **ON_DEMAND) as moe, torch.no_grad():
        assert isinstance(slots_of(moe), MappedSlots)
        file.write_bytes(whole[: len(whole) // 8])
        with pytest.raises(CheckpointError, match=r"model.safetensors: was changed"):
            moe.model(IDS)
        file.write_bytes(whole)
        found = moe.model(IDS).logits
    with MoE(tiny_checkpoint) as moe, torch.no_grad():
        assert torch.equal(found, moe.model(IDS).logits)


@pytest.mark.usefixtures("can_map")
def test_a_file_that_is_changed_between_two_passes_is_read_anew(tiny_checkpoint, copy_of):
    """Nothing looks at bytes that are not there any more: that would be a bus error."""
    file = copy_of(tiny_checkpoint) / "model.safetensors"
    whole = file.read_bytes()
    with MoE(file.parent) as moe, torch.no_grad():
        found = moe.model(IDS).logits
        for changed in (whole[:-1000], whole[:1000], bytes(len(whole))):
            file.write_bytes(changed)
            with pytest.raises(CheckpointError, match=r"model.safetensors: was changed"):
                moe.model(IDS)
            moe.check_invariants()
            file.write_bytes(whole)
            assert torch.equal(found, moe.model(IDS).logits)


@pytest.mark.usefixtures("can_map")
def test_what_was_computed_while_a_file_changed_is_no_answer(tiny_checkpoint, copy_of):
    file = copy_of(tiny_checkpoint) / "model.safetensors"
    with MoE(file.parent) as moe, torch.no_grad():
        found = moe.model(IDS).logits
        hook = moe.model.lm_head.register_forward_hook(lambda *args: file.touch())
        with pytest.raises(CheckpointError, match="was changed, or its disk failed"):
            moe.model(IDS)
        hook.remove()
        assert torch.equal(found, moe.model(IDS).logits)


@pytest.mark.usefixtures("can_map")
def test_a_file_that_is_shortened_in_the_middle_of_a_pass_is_an_error(tiny_checkpoint, copy_of):
    """Machine code that looks at bytes that are gone gets zeros, and the process goes on."""
    file = copy_of(tiny_checkpoint) / "model.safetensors"
    whole = file.read_bytes()
    with MoE(file.parent) as moe, torch.no_grad():
        found = moe.model(IDS).logits
        before = bus_errors.count
        hook = moe.model.model.embed_tokens.register_forward_hook(
            lambda *args: os.truncate(file, 0)
        )
        with pytest.raises(CheckpointError, match=r"model.safetensors: was changed"):
            moe.model(IDS)
        hook.remove()
        assert bus_errors.count > before
        file.write_bytes(whole)
        assert torch.equal(found, moe.model(IDS).logits)


@pytest.mark.usefixtures("can_map")
def test_decoding_goes_on_with_a_file_that_is_right_again(tiny_checkpoint, copy_of):
    """Machine code that computes all layers at once does not keep where experts were."""
    file = copy_of(tiny_checkpoint) / "model.safetensors"
    whole = file.read_bytes()
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}
    with MoE(file.parent, preload="wait") as moe:
        moe.preload()
        found = moe.generate(IDS, **settings)
        for changed in (whole[:5000], bytes(len(whole)), whole):
            file.write_bytes(changed)
            if changed != whole:
                with pytest.raises(CheckpointError, match="was changed"):
                    moe.generate(IDS, **settings)
            file.write_bytes(whole)
            assert torch.equal(found, moe.generate(IDS, **settings))


ELSEWHERE = """
import mmap, os, sys
from pathlib import Path
from moe_infinity.checkpoint.files import MappedFile, OpenFile

file = Path(sys.argv[1])
mapped = MappedFile(OpenFile(file))
with file.open("rb") as opened:
    elsewhere = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
os.truncate(file, 0)
print(sum(mapped.bytes), mapped.is_right(), flush=True)
print(elsewhere[5000])
"""


@pytest.mark.usefixtures("can_map")
def test_bytes_that_are_gone_elsewhere_end_the_process_as_before(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes([1]) * (3 << 20))
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(file)], capture_output=True, text=True, check=False
    )
    assert done.stdout == "0 False\n", done.stderr
    assert done.returncode == -signal.SIGBUS


@pytest.mark.usefixtures("can_map")
def test_a_failing_disk_is_an_error(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(bytes(3 << 20))
    reader = Reader()
    extent = Extent(file, 5000, 2 << 20)
    place = reader.mapped(extent)

    def failing(*args: Any) -> int:
        ctypes.set_errno(errno.EFAULT)
        return -1

    with monkeypatch.context() as patch:
        patch.setattr(linux.libc(), "madvise", failing)
        with pytest.raises(CheckpointError, match="Input/output error"):
            reader.read_into(extent, place)
    reader.read_into(extent, reader.mapped(extent))
    assert reader.bytes_read == 2 << 20
    reader.close()


@pytest.mark.usefixtures("can_map")
def test_an_interrupted_call_is_made_again(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    mapped = MappedFile(OpenFile(file))
    codes = [errno.EINTR, errno.EAGAIN]

    def interrupted(*args: Any) -> int:
        if not codes:
            return 0
        ctypes.set_errno(codes.pop())
        return -1

    monkeypatch.setattr(linux.libc(), "madvise", interrupted)
    mapped.populate(0, 5)
    assert (codes, mapped.bytes.tobytes()) == ([], b"12345")
