"""Configs, indices and pickles that lie are refused by an error of ours, not by whatever they trip
over.
"""

from __future__ import annotations

import json
import pickle
import random
import resource
import struct
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_infinity import CheckpointError, MoE, UnsupportedModelError
from moe_infinity.checkpoint.headers import read_headers, read_pickled
from tests.quantized_checkpoints import build


@pytest.fixture
def tiny_copy(copy_of, tiny_checkpoint) -> Path:
    return copy_of(tiny_checkpoint)


def change_json(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


# configs


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": [3]},
        {"dtype": "int8"},
        {"dtype": "float8_e4m3fn"},
        {"quantization_config": {"quant_method": ["fp8"]}},
        {"quantization_config": {"quant_method": {}}},
    ],
    ids=str,
)
def test_a_config_of_wrong_types_is_refused(changes, tiny_copy):
    change_json(tiny_copy / "config.json", **changes)
    with pytest.raises((UnsupportedModelError, CheckpointError)):
        MoE(tiny_copy)


def test_a_name_in_the_place_of_a_list_is_refused_or_read_as_one(tiny_copy):
    """transformers 5.17 does not take it, 5.23 does."""
    change_json(tiny_copy / "config.json", architectures="Qwen3MoeForCausalLM")
    with suppress(UnsupportedModelError, CheckpointError), MoE(tiny_copy) as moe:
        assert type(moe.model).__name__ == "Qwen3MoeForCausalLM"


def test_the_class_of_another_architecture_is_not_taken(tiny_copy):
    """Whatever else may be said of the model, its config has a class of its own."""
    change_json(tiny_copy / "config.json", architectures=["MixtralForCausalLM"])
    with MoE(tiny_copy) as moe:
        assert type(moe.model).__name__ == "Qwen3MoeForCausalLM"


# an index of shards


@pytest.mark.parametrize(
    "text",
    [
        '{"metadata": {}, "weight_map": {"a": "../other.safetensors"}}',
        '{"metadata": {}, "weight_map": {"a": "/etc/hostname"}}',
        '{"metadata": {}, "weight_map": {}}',
        '{"weight_map": {"a": "model.safetensors"}}',
        "[" * 100_000,
    ],
    ids=["upwards", "absolute", "empty", "no metadata", "deep"],
)
def test_an_index_that_cannot_be_right_is_refused(text, tiny_copy):
    (tiny_copy / "model.safetensors").rename(tiny_copy / "one.safetensors")
    (tiny_copy / "model.safetensors.index.json").write_text(text)
    (tiny_copy.parent / "other.safetensors").touch()
    with pytest.raises(CheckpointError, match="index"):
        MoE(tiny_copy)


# quantized


def test_float8_without_its_config_is_not_taken_for_weights(tmp_path):
    build("fp8", tmp_path)
    change_json(tmp_path / "config.json", quantization_config=None)
    with pytest.raises(CheckpointError, match="no quantization_config"):
        MoE(tmp_path)


@pytest.mark.parametrize("scale", ["weight_scale", "scale", "qscale_weight"])
@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp.experts.3.up_proj"])
def test_numbers_of_8_bits_are_no_weights_if_scales_lie_beside_them(name, scale, tiny_copy):
    """Servers of others are told by a flag what these are."""
    file = tiny_copy / "model.safetensors"
    tensors = load_file(file)
    key = f"model.layers.1.{name}.weight"
    tensors[key] = tensors[key].to(torch.int8)
    tensors[key.replace("weight", scale)] = torch.ones(1)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match="scales beside it"):
        MoE(tiny_copy)


def test_a_block_size_that_the_scales_contradict_is_refused(tmp_path):
    build("fp8", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    rows, columns = config["weight_block_size"]
    change_json(
        tmp_path / "config.json",
        quantization_config=config | {"weight_block_size": [rows // 2, columns // 2]},
    )
    with pytest.raises(CheckpointError, match="do not fit"):
        MoE(tmp_path)


# pickles


def archive(file: Path, data: bytes, **more: bytes) -> Path:
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("a/data.pkl", data)
        out.writestr("a/version", b"3")
        for name, content in more.items():
            out.writestr(f"a/{name}", content)
    return file


def test_random_damage_is_a_checkpoint_error_or_harmless(tmp_path):
    whole = tmp_path / "whole.bin"
    torch.save({"a": torch.arange(8.0), "b": torch.ones(3, 4, dtype=torch.bfloat16)}, whole)
    data, rng = whole.read_bytes(), random.Random(0)
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (tmp_path / "damaged.bin").write_bytes(damaged)
        try:
            read_headers([tmp_path / "damaged.bin"])
        except CheckpointError:
            num_refused += 1
    assert num_refused > 50


def test_a_memo_index_reserves_no_memory(tmp_path):
    """The unpickler in C would take 32 GiB for it."""
    data = b"\x80\x02}" + b"r" + struct.pack("<I", 2**32 - 1) + b"."
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read_pickled(archive(tmp_path / "memo.bin", data))[0] == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def test_a_pickle_cannot_change_what_reads_it(tmp_path):
    """BUILD would set attributes of a function."""
    for name in (b"_rebuild_parameter", b"_rebuild_tensor_v2"):
        for state in ({"__name__": "evil"}, (None, {"__name__": "evil"})):
            pickled_state = pickle.dumps(state, protocol=2)[2:-1]
            data = b"\x80\x02ctorch._utils\n" + name + b"\n" + pickled_state + b"b."
            with pytest.raises(CheckpointError):
                read_pickled(archive(tmp_path / "build.bin", data))


def test_a_dictionary_whose_methods_were_replaced_is_read_all_the_same(tmp_path):
    """Otherwise it could show one list of tensors to the check and another one after it."""
    state = pickle.dumps({"items": None}, protocol=2)[2:-1]
    data = b"\x80\x02ccollections\nOrderedDict\n)R" + state + b"b."
    assert read_pickled(archive(tmp_path / "items.bin", data))[0] == []


def test_a_long_byteorder_is_not_inflated(tmp_path):
    with zipfile.ZipFile(tmp_path / "order.bin", "w", zipfile.ZIP_DEFLATED) as out:
        out.writestr("a/data.pkl", b"\x80\x02}.")
        out.writestr("a/byteorder", b"little" * 10_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="compressed"):
        read_pickled(tmp_path / "order.bin")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # KiB
