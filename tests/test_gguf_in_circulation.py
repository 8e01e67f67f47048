"""GGUF files as other programs write them: merged from parts, with ids of no token, with several
ends of an answer, with numbers of other types.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGUFValueType as T

from moe_infinity import CheckpointError, MoE
from tests.gguf_files import build, rewrite
from tools.convert_to_gguf import convert

DEMO = Path(__file__).parent.parent / "models" / "demo"
IDS = torch.arange(3, 23)[None]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of Qwen3-MoE in float32, without a vocabulary."""
    folder = build("qwen3_moe", tmp_path_factory.mktemp("small"))
    convert(folder, folder / "model.gguf", "f32")
    return folder / "model.gguf"


def logits_of(file: Path) -> torch.Tensor:
    with MoE(file, device="cpu", dtype="float32", exact=True) as moe, torch.no_grad():
        found: torch.Tensor = moe.model(IDS).logits
    return found


# split and merged


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("name", ["merged.gguf", "merged-00001-of-00003.gguf"])
def test_a_merged_file_is_one_file_whatever_its_parts_said(count, name, small, tmp_path):
    keys = {
        "split.no": (T.UINT16, 0), "split.count": (T.UINT16, count),
        "split.tensors.count": (T.INT32, 9),
    }  # fmt: skip
    file = rewrite(small, tmp_path / name, keys)
    assert torch.equal(logits_of(file), logits_of(small))


def test_a_part_that_is_called_otherwise_is_refused(small, tmp_path):
    keys = {"split.no": (T.UINT16, 0), "split.count": (T.UINT16, 3)}
    file = rewrite(small, tmp_path / "part.gguf", keys)
    with pytest.raises(CheckpointError, match="part 0 of 3"):
        MoE(file)


# ids


@pytest.mark.parametrize("key", ["padding", "bos", "eos", "eot", "unknown"])
@pytest.mark.parametrize("value", [128, 4294967295])
def test_an_id_of_no_token_is_left_out(key, value, small, tmp_path, caplog):
    name = f"tokenizer.ggml.{key}_token_id"
    file = rewrite(small, tmp_path / "m.gguf", {name: (T.UINT32, value)})
    with caplog.at_level(logging.WARNING), MoE(file, device="cpu") as moe:
        config = moe.model.config
        named = {"padding": config.pad_token_id, "bos": config.bos_token_id}
        assert named.get(key, config.eos_token_id) is None
    assert (name in caplog.text) is (value == 128)


def test_an_answer_ends_with_any_end_of_the_file(small, tmp_path):
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with MoE(small, device="cpu", dtype="float32") as moe:
        answer = moe.generate(IDS, **settings)[0, 20:].tolist()
    end = next(token for token in answer[1:] if token != answer[0])
    for key in ("eot", "eom"):
        keys = {
            "tokenizer.ggml.eos_token_id": (T.UINT32, 127),
            f"tokenizer.ggml.{key}_token_id": (T.UINT32, end),
        }
        file = rewrite(small, tmp_path / f"{key}.gguf", keys)
        with MoE(file, device="cpu", dtype="float32") as moe:
            assert moe.model.generation_config.eos_token_id == [127, end]
            found = moe.generate(IDS, **settings)[0, 20:].tolist()
        assert found == answer[: answer.index(end) + 1]


# the tokenizer, through the class


def test_a_config_without_a_tokenizer_leaves_that_of_the_file(tmp_path, command):
    convert(DEMO, tmp_path / "demo.gguf", "bf16")
    (tmp_path / "config").mkdir()
    shutil.copy(DEMO / "config.json", tmp_path / "config")
    run = ("-p", "Once upon a time", "--max-new-tokens", "8", "--exact", "--json")
    found = json.loads(
        command("run", tmp_path / "demo.gguf", "--config", tmp_path / "config", *run).out
    )
    assert found["text"] == json.loads(command("run", DEMO, *run).out)["text"]


def test_a_tokenizer_beside_the_file_is_not_that_of_the_file(tmp_path):
    """A folder may hold files of several models."""
    convert(DEMO, tmp_path / "demo.gguf", "bf16")
    (tmp_path / "tokenizer.json").write_text("{}")
    with MoE(tmp_path / "demo.gguf", device="cpu") as moe:
        assert moe.tokenizer("Once upon").input_ids == moe.tokenizer("Once upon").input_ids
        assert moe.tokenizer.eos_token == "<|endoftext|>"


def test_the_type_of_a_number_does_not_matter(small, tmp_path):
    """As in files of other programs: 8, 16, 32 or 64 bits, signed or not."""
    reader = gguf.GGUFReader(small)
    keys = {
        key: (T.INT64 if number % 2 else T.UINT16, field.contents())
        for number, (key, field) in enumerate(reader.fields.items())
        if key.startswith("qwen3moe.") and isinstance(field.contents(), int)
    }
    keys["qwen3moe.attention.layer_norm_rms_epsilon"] = (T.FLOAT64, 1e-6)
    keys["qwen3moe.rope.freq_base"] = (T.UINT32, 5000)
    assert len(keys) > 8
    assert torch.equal(logits_of(rewrite(small, tmp_path / "m.gguf", keys)), logits_of(small))
