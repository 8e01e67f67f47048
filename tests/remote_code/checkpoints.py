"""Checkpoint folders that bring their own modelling code, as on the hub: the .py files beside the
weights, and `auto_map` in config.json."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch


class RemoteModel(NamedTuple):
    """A model whose code travels with its checkpoint."""

    module: str
    config_class: str
    model_class: str
    config: dict[str, Any]  # what differs from the defaults
    num_moe_layers: int
    top_k: int


GROK = ("modeling_grok", "Grok1Config", "Grok1ForCausalLM")
MODELS = {
    "Arctic": RemoteModel("modeling_arctic", "ArcticConfig", "ArcticForCausalLM", {}, 2, 2),
    "Grok": RemoteModel(*GROK, {}, 3, 2),
    "GrokDict": RemoteModel(*GROK, {"experts_container": "dict"}, 3, 2),
    "DeepseekMoe": RemoteModel(
        "modeling_deepseek_moe", "DeepseekConfig", "DeepseekForCausalLM", {}, 2, 3
    ),
}
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def save_remote_code_model(folder: Path, name: str, **changes: Any) -> Path:
    """A tiny random bf16 model, wide enough that every expert and every token matters; `changes`
    to its config."""
    spec = MODELS[name]
    module = importlib.import_module(f"tests.remote_code.{spec.module}")
    auto_map = {
        "AutoConfig": f"{spec.module}.{spec.config_class}",
        "AutoModelForCausalLM": f"{spec.module}.{spec.model_class}",
    }
    config_class = getattr(module, spec.config_class)
    config = config_class(auto_map=auto_map, **SPECIAL_TOKENS | spec.config | changes)
    torch.manual_seed(0)
    model = getattr(module, spec.model_class)(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(std=0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    for file in ("modeling_base.py", f"{spec.module}.py"):
        shutil.copyfile(Path(__file__).with_name(file), folder / file)
    return folder
