"""Weights in pickles (.bin): the same tokens; what is broken is refused by name, and what would run
code is not run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_infinity import CheckpointError, MoE
from moe_infinity.checkpoint.headers import read_pickled
from moe_infinity.cli.inspection import inspect_checkpoint
from tests.architectures.encoder_decoders import (
    BUDGETS,
    CONFIGS,
    correct_stock,
    forward_and_generate,
    make_model,
    save_bin,
)

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(3)]


@pytest.fixture(scope="module", params=CONFIGS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def bin_checkpoint(name, tmp_path_factory) -> Path:
    return save_bin(make_model(name).to(torch.bfloat16), tmp_path_factory.mktemp("bin"))


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.grid
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_bin_checkpoint_gives_the_tokens_of_correct_stock(name, tmp_path, num_shards):
    save_bin(make_model(name).to(torch.bfloat16), tmp_path, num_shards=num_shards)
    assert len(list(tmp_path.glob("*.bin"))) == num_shards
    expected = forward_and_generate(correct_stock(tmp_path))
    for budget in BUDGETS:
        with MoE(tmp_path, host_memory=budget, exact=True) as moe:
            found = forward_and_generate(moe.model)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs), budget


def test_weights_that_share_a_storage_in_the_pickle_give_the_tokens_of_stock(name, tmp_path):
    file = save_bin(make_model(name).to(torch.bfloat16), tmp_path) / "pytorch_model.bin"
    tensors = torch.load(file, weights_only=True)
    experts = {key: tensor for key, tensor in tensors.items() if ".expert_" in key}
    together = torch.cat([tensor.flatten() for tensor in experts.values()])
    parts = together.split([tensor.numel() for tensor in experts.values()])
    views = {key: part.view_as(experts[key]) for key, part in zip(experts, parts, strict=True)}
    torch.save(tensors | views, file)
    expected = forward_and_generate(correct_stock(tmp_path))
    with MoE(tmp_path, host_memory="50%", exact=True) as moe:
        for ours, theirs in zip(forward_and_generate(moe.model), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_weights_of_a_gpu_are_read_without_one(bin_checkpoint, copy_of, monkeypatch):
    folder = copy_of(bin_checkpoint)
    file = folder / "pytorch_model.bin"
    here, _ = read_pickled(file)
    tensors = torch.load(file, weights_only=True)
    monkeypatch.setattr(torch.serialization, "location_tag", lambda _: "cuda:0")
    torch.save(tensors, file)
    there, _ = read_pickled(file)
    assert [(t.name, t.kind) for t in there] == [(t.name, t.kind) for t in here]
    content = file.read_bytes()
    for tensor in there:
        start, end = tensor.extent.offset, tensor.extent.offset + tensor.extent.num_bytes
        assert content[start:end] == bytes_of(tensors[tensor.name])


def test_a_transposed_weight_in_the_pickle_is_refused_by_name(bin_checkpoint, copy_of):
    """Its bytes do not lie in the order of its elements; read as they lie they would be wrong."""
    file = copy_of(bin_checkpoint) / "pytorch_model.bin"
    tensors = torch.load(file, weights_only=True)
    key = next(key for key, t in tensors.items() if ".expert_" in key and t.ndim == 2)
    torch.save(tensors | {key: tensors[key].T.contiguous().T}, file)
    with pytest.raises(CheckpointError, match=key):
        MoE(file.parent, host_memory="50%")


def test_inspecting_a_bin_checkpoint_tells_what_inspecting_safetensors_tells(
    name, bin_checkpoint, tmp_path
):
    make_model(name).to(torch.bfloat16).save_pretrained(tmp_path)
    ours, theirs = (inspect_checkpoint(str(folder)) for folder in (bin_checkpoint, tmp_path))
    assert (ours.moe_layers, ours.experts_per_layer) == (4, 8)
    assert ours.expert_bytes == theirs.expert_bytes


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_truncated_bin_is_refused_by_name(bin_checkpoint, copy_of, share):
    folder = copy_of(bin_checkpoint)
    file = folder / "pytorch_model.bin"
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(CheckpointError, match=file.name):
        MoE(folder, host_memory="50%")


def test_a_missing_bin_shard_is_refused_by_name(name, tmp_path):
    save_bin(make_model(name), tmp_path, num_shards=3)
    lost = sorted(tmp_path.glob("*.bin"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        MoE(tmp_path, host_memory="50%")


class Intruder:
    """What unpickles to a call of its author's choice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_code_in_a_pickle_is_refused_and_not_run(bin_checkpoint, copy_of, tmp_path):
    folder, made = copy_of(bin_checkpoint), tmp_path / "made"
    file = folder / "pytorch_model.bin"
    torch.save(torch.load(file, weights_only=True) | {"intruder": Intruder(made)}, file)
    with pytest.raises(CheckpointError, match=file.name):
        MoE(folder, host_memory="50%")
    assert not made.exists()
    torch.load(file, weights_only=False)  # what it would have done
    assert made.exists()
    shutil.rmtree(made)
