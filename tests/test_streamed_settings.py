"""stream() and the command line keep what generation_config.json says, or name what they cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from moe_infinity import ConfigError, MoE
from moe_infinity.cli.app import settings_of

DEMO = Path(__file__).parents[1] / "models" / "demo"
PROMPT = "w5 w6 w9 w100 w31"
IDS = torch.tensor([[5, 6, 9, 100, 31]])
REFUSED: dict[str, Any] = {
    "constraints": ["x"],
    "dola_layers": "low",
    "force_words_ids": [[5]],
    "num_beams": 4,
    "num_return_sequences": 3,
    "penalty_alpha": 0.6,
}


@pytest.fixture(scope="module")
def moe(tiny_checkpoint: Path) -> Iterator[MoE]:
    with MoE(tiny_checkpoint, host_memory="50%", dtype="float32") as moe:
        yield moe


def streamed(moe: MoE, **settings: Any) -> list[int]:
    stream = moe.stream(PROMPT, max_new_tokens=8, **settings)
    list(stream)
    return stream.token_ids


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_without_a_stream_is_named_at_once(moe, monkeypatch, name):
    given = GenerationConfig()
    setattr(given, name, REFUSED[name])
    for arguments in ({name: REFUSED[name]}, {"generation_config": given}):
        with pytest.raises(ConfigError, match=rf"^{name}\b.*no stream"):
            moe.stream(PROMPT, **arguments)
    monkeypatch.setattr(moe.model.generation_config, name, REFUSED[name])
    with pytest.raises(ConfigError, match=rf"^{name}\b.*no stream"):
        moe.stream(PROMPT)
    if name == "num_beams":
        assert len(streamed(moe, num_beams=1)) == 8


def test_a_stop_string_of_the_checkpoint_ends_a_stream(tmp_path):
    """With a tokenizer as transformers' stop strings need it."""
    folder = shutil.copytree(DEMO, tmp_path / "demo")
    prompt = "The old house stood"
    with MoE(folder, host_memory="100%") as moe:
        text = "".join(moe.stream(prompt, max_new_tokens=12))
        stop = text.split()[1]
        file = folder / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"stop_strings": stop}))
    with MoE(folder, host_memory="100%") as moe:
        cut = "".join(moe.stream(prompt, max_new_tokens=12))
    assert text.startswith(cut)
    assert stop in cut
    assert len(cut) < len(text)


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 50.0},
        {"no_repeat_ngram_size": 1},
        {"guidance_scale": 1.5},
        {"prompt_lookup_num_tokens": 2},
        {"suppress_tokens": [5]},
        {"min_new_tokens": 4, "eos_token_id": 5},
    ],
)
def test_a_stream_has_the_tokens_of_generate(moe, monkeypatch, values):
    for name, value in values.items():
        monkeypatch.setattr(moe.model.generation_config, name, value)
    expected = moe.generate(IDS, max_new_tokens=8)[0, 5:].tolist()
    assert streamed(moe) == expected


def test_the_command_line_leaves_to_the_checkpoint_what_it_is_not_told():
    assert settings_of(9, None, None, None) == {"max_new_tokens": 9}
    assert settings_of(9, 0.0, None, None) == {"max_new_tokens": 9, "do_sample": False}
    warm = {"max_new_tokens": 9, "do_sample": True, "temperature": 0.5, "top_p": 0.9}
    assert settings_of(9, 0.5, 0.9, None) == warm
