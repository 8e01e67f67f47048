"""How answers of GGUF files are generated, for which others have generation_config.json."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGUFValueType as T

from moe_infinity import MoE
from tests.gguf_files import build, rewrite
from tools.convert_to_gguf import convert

IDS = torch.arange(3, 23)[None]
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
NAMES = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of Qwen3-MoE in float32, without a vocabulary; its folder has no other settings
    than config.json.
    """
    folder = build("qwen3_moe", tmp_path_factory.mktemp("small"))
    (folder / "generation_config.json").unlink()
    convert(folder, folder / "model.gguf", "f32")
    return folder / "model.gguf"


def generation_of(file: Path, **options: Any) -> transformers.GenerationConfig:
    with MoE(file, device="cpu", dtype="float32", **options) as moe:
        return moe.model.generation_config


def settings_of(file: Path, **options: Any) -> dict[str, Any]:
    found = generation_of(file, **options).to_diff_dict()
    return {name: found[name] for name in NAMES if name in found}


def sampling(**values: Any) -> dict[str, Any]:
    """Metadata with these recommendations: floats and integers of the converter's types."""
    typed = {float: T.FLOAT32, int: T.INT32}
    return {
        f"general.sampling.{key}": (typed[type(value)], value) if type(value) in typed else value
        for key, value in values.items()
    }


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {}),
        (
            {"temp": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "penalty_repeat": 1.05},
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05,
             "repetition_penalty": 1.05},
        ),
        ({"temp": 0.0, "top_k": 20}, {"do_sample": False, "repetition_penalty": 1.0}),
        ({"temp": -1.0, "penalty_repeat": 1.5}, {"do_sample": False, "repetition_penalty": 1.5}),
        ({"top_k": -1}, {"do_sample": True, "top_k": 0}),
        ({"temp": "0.6"}, {"do_sample": True, "temperature": 0.6}),
        ({"penalty_repeat": 1.5, "penalty_last_n": 0}, {}),
    ],
)  # fmt: skip
def test_the_recommended_settings_of_a_file_are_its_defaults(keys, expected, small, tmp_path):
    file = rewrite(small, tmp_path / "m.gguf", sampling(**keys))
    assert settings_of(file) == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temp", "warm"), ("top_p", 1.5), ("mirostat", 2), ("sequence", "kt"),
        ("xtc_probability", 0.5), ("penalty_last_n", 64), ("temp", float("nan")),
    ],
)  # fmt: skip
def test_a_setting_that_has_no_meaning_here_is_named(key, value, small, tmp_path, caplog):
    file = rewrite(small, tmp_path / "m.gguf", sampling(**{key: value}))
    with caplog.at_level(logging.WARNING):
        assert settings_of(file) == {}
    assert f"general.sampling.{key}" in caplog.text


def test_suppressed_tokens_are_never_written(small, tmp_path):
    with MoE(small, device="cpu", dtype="float32") as moe:
        first = moe.generate(IDS, **GREEDY)[0, 20].item()
    tokens = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{number}" for number in range(128)],
        "tokenizer.ggml.suppress_tokens": [first, 128, -1],
    }
    with MoE(rewrite(small, tmp_path / "m.gguf", tokens), device="cpu", dtype="float32") as moe:
        assert moe.model.generation_config.suppress_tokens == [first]
        assert first not in moe.generate(IDS, **GREEDY)[0, 20:].tolist()


def test_the_generation_config_beside_the_named_config_counts_and_all_ends_do(small, tmp_path):
    config = transformers.AutoConfig.from_pretrained(small.parent)
    config.save_pretrained(tmp_path)
    keys = sampling(temp=0.7) | {
        "tokenizer.ggml.eos_token_id": (T.UINT32, 5), "tokenizer.ggml.eot_token_id": (T.UINT32, 6),
    }  # fmt: skip
    file = rewrite(small, tmp_path / "m.gguf", keys)
    found = generation_of(file, config_from=str(tmp_path))
    assert (found.temperature, found.eos_token_id) == (0.7, [5, 6])
    said = {"eos_token_id": [7, 5], "do_sample": True, "top_k": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    found = generation_of(file, config_from=str(tmp_path))
    assert settings_of(file, config_from=str(tmp_path)) == {"do_sample": True, "top_k": 3}
    assert found.eos_token_id == [7, 5, 6]
