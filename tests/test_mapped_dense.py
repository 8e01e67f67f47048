"""Packed dense weights of a model that fits compute where the page cache has them, with the bits of
copied ones.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.architectures.model_parts import PackedLinear
from moe_infinity.checkpoint import expert_loader
from moe_infinity.errors import CheckpointError
from moe_infinity.kernels.cpu.bus_errors import bus_errors
from moe_infinity.memory import room
from moe_infinity.memory.room import ProcessMemory
from moe_infinity.system import linux
from tests.closeness import logits_of_steps
from tests.gguf_files import build
from tests.gguf_models import WIDE
from tests.on_demand import ON_DEMAND
from tests.test_mapped import IDS, can_map, small_models_are_mapped
from tools.convert_to_gguf import convert

__all__ = ["can_map", "small_models_are_mapped"]

COPIED = 1 << 40  # more bytes than any model has


@pytest.fixture
def gguf_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    convert(build("qwen3_moe", tmp_path / "model", **WIDE), file, getattr(request, "param", "q8_0"))
    return file


def is_in_page_cache(moe: MoE) -> bool:
    """Whether the packed linear layers lie in a mapped file; either all or none do."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(".gguf"):
            ranges.append([int(end, 16) for end in line.split()[0].split("-")])
    packed = [m.packed.memory for m in moe.model.modules() if isinstance(m, PackedLinear)]
    inside = {any(first <= memory.data_ptr() < end for first, end in ranges) for memory in packed}
    assert len(inside) == 1
    return inside.pop()


def logits_of(file: Path, **options: Any) -> tuple[torch.Tensor, bool]:
    with MoE(file, **options) as moe, torch.no_grad():
        return logits_of_steps(moe.model, IDS), is_in_page_cache(moe)


@pytest.mark.usefixtures("can_map")
@pytest.mark.parametrize("gguf_file", ["q8_0", "q4_k_m", "mxfp4"], indirect=True)
def test_they_have_the_bits_of_copied_ones(gguf_file, monkeypatch):
    mapped, is_mapped = logits_of(gguf_file)
    assert is_mapped
    monkeypatch.setattr(expert_loader, "MIN_MAPPED_BYTES", COPIED)
    copied, is_mapped = logits_of(gguf_file)
    assert not is_mapped
    assert torch.equal(mapped, copied)


@pytest.mark.usefixtures("can_map")
def test_they_count_as_memory_that_is_used(gguf_file, monkeypatch):
    """The system counts them as free, as all of the page cache."""
    monkeypatch.setattr(room, "own_bytes", lambda: 0)
    monkeypatch.setattr(room, "available_memory_bytes", lambda: 1 << 30)
    monkeypatch.setattr(room, "machine_memory_bytes", lambda: 2 << 30)
    with MoE(gguf_file) as moe:
        packed = [m.packed for m in moe.model.modules() if isinstance(m, PackedLinear)]
        num_bytes = sum(weight.nbytes for weight in packed)
        assert num_bytes > 0
        assert moe.engine.room.memory.left() == ProcessMemory(None).left() - num_bytes


@pytest.mark.usefixtures("can_map")
def test_they_are_copied_where_experts_have_a_budget(gguf_file):
    assert not logits_of(gguf_file, host_memory="100%")[1]


@pytest.mark.usefixtures("can_map")
@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_where_files_cannot_be_mapped_they_are_copied(gguf_file, code, monkeypatch):
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    wanted, _ = logits_of(gguf_file)
    monkeypatch.setattr(linux, "populate", refuse)
    found, is_mapped = logits_of(gguf_file)
    assert not is_mapped
    assert torch.equal(wanted, found)


@pytest.mark.usefixtures("can_map")
def test_a_file_that_is_right_again_is_used_again(gguf_file):
    whole = gguf_file.read_bytes()
    with MoE(gguf_file) as moe, torch.no_grad():
        found = moe.model(IDS).logits
        for changed in (whole[:-1000], whole[:1000], bytes(len(whole))):
            gguf_file.write_bytes(changed)
            with pytest.raises(CheckpointError, match=r"model.gguf: was changed"):
                moe.model(IDS)
            gguf_file.write_bytes(whole)
            assert torch.equal(found, moe.model(IDS).logits)


@pytest.mark.usefixtures("can_map")
def test_bytes_that_were_gone_while_they_were_used_come_back(gguf_file):
    """Zeros took their place: without a new mapping they would stay, and tokens be wrong."""
    whole = gguf_file.read_bytes()
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8}
    with MoE(gguf_file, **ON_DEMAND) as moe, torch.no_grad():
        found = moe.generate(IDS, **settings)
        logits = moe.model(IDS).logits
        before = bus_errors.count
        embedding = moe.model.model.embed_tokens
        hook = embedding.register_forward_hook(lambda *args: os.truncate(gguf_file, 0))
        with pytest.raises(CheckpointError, match=r"model.gguf: was changed"):
            moe.model(IDS)
        hook.remove()
        assert bus_errors.count > before
        with pytest.raises(CheckpointError, match="was changed"):
            moe.generate(IDS, **settings)
        gguf_file.write_bytes(whole)
        assert torch.equal(logits, moe.model(IDS).logits)
        assert torch.equal(found, moe.generate(IDS, **settings))


@pytest.mark.usefixtures("can_map")
def test_a_pass_that_computed_with_gone_bytes_is_an_error_although_they_are_back(gguf_file):
    """Experts that are loaded later in the same pass do not hide it."""
    whole = gguf_file.read_bytes()
    with MoE(gguf_file, **ON_DEMAND) as moe, torch.no_grad():
        found = moe.model(IDS).logits
        moe.engine.drop_experts()
        first = moe.model.model.layers[0]
        hooks = [
            moe.model.model.embed_tokens.register_forward_hook(
                lambda *args: os.truncate(gguf_file, 0)
            ),
            first.post_attention_layernorm.register_forward_pre_hook(
                lambda *args: gguf_file.write_bytes(whole) and None
            ),
        ]
        with pytest.raises(CheckpointError, match="was changed, or its disk failed"):
            moe.model(IDS)
        for hook in hooks:
            hook.remove()
        assert torch.equal(found, moe.model(IDS).logits)


@pytest.mark.usefixtures("can_map")
def test_another_file_of_the_same_bytes_takes_the_place(gguf_file):
    whole = gguf_file.read_bytes()
    with MoE(gguf_file) as moe, torch.no_grad():
        found = moe.model(IDS).logits
        copy = gguf_file.with_name("copy")
        copy.write_bytes(whole)
        os.truncate(gguf_file, 0)
        os.replace(copy, gguf_file)
        assert torch.equal(found, moe.model(IDS).logits)
