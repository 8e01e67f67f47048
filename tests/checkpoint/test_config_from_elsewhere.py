"""`config_from`: a folder whose config and tokenizer are used instead of the model's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from moe_infinity import CheckpointError, ConfigError, MoE
from moe_infinity.cli.inspection import inspect_checkpoint


def other_config(folder: Path, out: Path, **changes: object) -> str:
    """A folder with the config and tokenizer of another one, changed so, and no weights."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | changes))
    return str(out)


def test_a_config_from_elsewhere_sets_the_context_and_the_template(tiny_checkpoint, tmp_path):
    elsewhere = other_config(tiny_checkpoint, tmp_path / "long", max_position_embeddings=4096)
    (tmp_path / "long" / "chat_template.jinja").write_text("a template")
    ids = torch.tensor([[5, 6, 7, 8]])
    with MoE(tiny_checkpoint) as moe:
        expected = moe.model(ids).logits
    with MoE(tiny_checkpoint, config_from=elsewhere) as moe:
        assert moe.model.config.max_position_embeddings == 4096
        assert moe.tokenizer.chat_template == "a template"
        assert torch.equal(moe.model(ids).logits, expected)
    own, other = (
        inspect_checkpoint(str(tiny_checkpoint), config_from=c) for c in (None, elsewhere)
    )
    assert own == other


def test_a_config_of_other_sizes_is_refused(tiny_checkpoint, tmp_path):
    elsewhere = other_config(tiny_checkpoint, tmp_path / "wide", hidden_size=96)
    with pytest.raises(CheckpointError, match=r"the model wants \[96"):
        MoE(tiny_checkpoint, config_from=elsewhere)


def test_a_config_of_another_architecture_is_refused(tiny_checkpoint, tmp_path):
    changes = {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"]}
    elsewhere = other_config(tiny_checkpoint, tmp_path / "other", **changes)
    with pytest.raises(ConfigError, match="config of a OlmoeForCausalLM"):
        MoE(tiny_checkpoint, config_from=elsewhere)
