"""Files of a checkpoint that are no JSON, or other JSON than transformers writes: an error of ours
that names the file."""

from __future__ import annotations

import json

import pytest

from moe_infinity import CheckpointError, MoE, MoEInfinityError

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
