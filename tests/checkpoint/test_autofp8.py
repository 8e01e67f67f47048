"""Checkpoints of AutoFP8: float8 with one `weight_scale` a tensor, and scales of activations."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moe_infinity import CheckpointError, MoE

pytestmark = [pytest.mark.timeout(60), pytest.mark.arithmetic]
PROMPT = torch.tensor([[5, 6, 9, 100, 31]])


def test_autofp8_has_the_logits_of_its_unpacked_weights(tiny_checkpoint, copy_of, tmp_path):
    folder = copy_of(tiny_checkpoint)
    plain = tmp_path / "plain"
    shutil.copytree(tiny_checkpoint, plain)
    packed = {}
    unpacked = load_file(plain / "model.safetensors")
    for name, weight in list(unpacked.items()):
        if "_proj" not in name:
            packed[name] = weight
            continue
        scale = weight.abs().max().float() / 448
        packed[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
        packed[f"{name}_scale"] = scale
        packed[name.replace("weight", "input_scale")] = torch.tensor(1.0)
        unpacked[name] = (packed[name].float() * scale).bfloat16()
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(unpacked, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    (folder / "config.json").write_text(json.dumps(config))
    stock = AutoModelForCausalLM.from_pretrained(plain, dtype="auto")
    with MoE(folder, host_memory="40%", exact=True) as moe, torch.no_grad():
        assert torch.equal(moe.model(PROMPT).logits, stock(PROMPT).logits)

    del packed[next(name for name in packed if name.endswith("weight_scale"))]
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="no tensor .*_scale"):
        MoE(folder)
