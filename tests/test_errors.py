"""What goes wrong in the world ends in one of our errors: it names what was found, comes in bounded
time, and leaves nothing half done. Every case of the contract, through the front door."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
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
    UnsupportedModelError,
)
from moe_infinity.cli.inspection import inspect_checkpoint
from moe_infinity.system.machine import machine_memory_bytes
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


def test_a_truncated_shard_is_named(copy_of, sharded_checkpoint):
    folder = copy_of(sharded_checkpoint)
    cut = sorted(folder.glob("*.safetensors"))[1]
    os.truncate(cut, cut.stat().st_size - 100)
    refused(folder, CheckpointError, cut.name, "truncated")


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


def test_pickled_weights_of_another_model_are_refused(broken):
    weights(broken).unlink()
    torch.save({"a": torch.ones(1)}, broken / "pytorch_model.bin")
    refused(broken, CheckpointError, "no tensors for", "experts.down_proj")


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
def test_a_header_that_lies_is_refused_with_its_file(broken, lie):
    safetensors_file.edit_header(weights(broken), lie)
    refused(broken, CheckpointError, "model.safetensors")


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


def test_an_unknown_quantization_is_refused_with_those_that_are_known(broken):
    edit_config(broken, quantization_config={"quant_method": "hqq"})
    with pytest.raises(UnsupportedModelError, match="(?s)hqq.*gptq"):
        MoE(broken, host_memory="50%")


# budgets and options


@pytest.mark.parametrize("host_memory", [0, BYTES_PER_EXPERT - 1, "1KiB", "1%"])
def test_a_budget_below_one_expert_is_refused_with_what_one_takes(tiny_checkpoint, host_memory):
    with pytest.raises(ConfigError, match=r"3\.0 KiB.*\n.*host_memory"):
        MoE(tiny_checkpoint, host_memory=host_memory)


def test_a_budget_of_one_expert_is_enough(tiny_checkpoint, resident_model):
    with MoE(tiny_checkpoint, host_memory=BYTES_PER_EXPERT) as moe:
        assert tokens_of(moe) == tokens_of(resident_model)


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
    broken, command, break_it, said
):
    break_it(broken)
    outcome = command("run", broken, "-p", "w5", "--host-memory", "50%", "--json")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said(said)
