"""Files of a checkpoint that are no JSON, or other JSON than transformers writes: an error of ours
that names the file."""

from __future__ import annotations

import json

import pytest

from moe_infinity import CheckpointError, MoE, MoEInfinityError
from moe_infinity.inspection import inspect_checkpoint

pytestmark = [pytest.mark.timeout(60)]
ODD = {
    "null": b"null", "list": b"[]", "number": b"3", "text": b'"x"', "empty": b"",
    "mark": b"\xef\xbb\xbf{}", "utf16": "{}".encode("utf-16"), "latin": b'{"a": "\xe9"}',
    "deep": b"[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "index"])
def test_an_odd_file_is_named(tiny_checkpoint, copy_of, file, kind):
    folder = copy_of(tiny_checkpoint)
    if file == "index":
        file = "model.safetensors.index.json"
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / file).write_bytes(ODD[kind])
    with pytest.raises(MoEInfinityError, match=file):
        MoE(folder)


def test_an_index_without_metadata_is_refused(sharded_checkpoint, copy_of):
    """transformers writes into it."""
    folder = copy_of(sharded_checkpoint)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": None}))
    with pytest.raises(CheckpointError, match="index.json: not an index of shards"):
        MoE(folder)


@pytest.mark.parametrize("value", [{"max_new_tokens": "x"}, {"suppress_tokens": 3}])
def test_a_generation_config_of_wrong_types_is_refused(tiny_checkpoint, copy_of, value):
    folder = copy_of(tiny_checkpoint)
    (folder / "generation_config.json").write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="generation_config.json"):
        MoE(folder)


@pytest.mark.parametrize("value", [{"a": 1}, [None], "x", [[1]], True])
def test_ids_of_tokens_that_are_none_are_named(tiny_checkpoint, copy_of, value):
    folder = copy_of(tiny_checkpoint)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"generation_config.json.*eos_token_id"):
        MoE(folder)


@pytest.mark.parametrize("change", [{"top_k": "x"}, {"min_length": []}, {"num_beams": "2"}])
def test_numbers_that_are_none_are_named(tiny_checkpoint, copy_of, change):
    folder = copy_of(tiny_checkpoint)
    (folder / "generation_config.json").write_text(json.dumps(change))
    with pytest.raises(CheckpointError, match=f"generation_config.json.*{next(iter(change))}"):
        MoE(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "nope"}, {"head_dim": 0}, {"num_attention_heads": 0},
        {"decoder_sparse_step": 0}, {"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}},
        {"num_experts_per_tok": 0}, {"num_experts_per_tok": -1}, {"num_experts_per_tok": 1000},
    ],
)  # fmt: skip
def test_a_config_of_which_no_model_can_be_built_is_refused(tiny_checkpoint, copy_of, change):
    folder = copy_of(tiny_checkpoint)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    for open_it in (MoE, inspect_checkpoint):
        with pytest.raises(MoEInfinityError, match=r"config\.json"):
            open_it(str(folder))


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_an_odd_tokenizer_file_is_named(tiny_checkpoint, copy_of, file, kind):
    folder = copy_of(tiny_checkpoint)
    (folder / file).write_bytes(ODD[kind])
    with MoE(folder) as moe, pytest.raises(CheckpointError, match="tokenizer"):
        moe.tokenizer  # noqa: B018


@pytest.mark.parametrize("change", [{"eos_token": 3}, {"tokenizer_class": []}, {"auto_map": 3}])
def test_an_odd_value_of_a_tokenizer_is_an_error_of_ours(tiny_checkpoint, copy_of, change):
    folder = copy_of(tiny_checkpoint)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | change))
    with MoE(folder) as moe, pytest.raises(CheckpointError, match="no usable tokenizer"):
        moe.tokenizer  # noqa: B018
