"""What ModelOpt writes, as published: where the config says so, and what it leaves as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_infinity import MoE, UnsupportedModelError
from moe_infinity.cli.inspection import inspect_checkpoint
from moe_infinity.errors import CheckpointError
from tests.closeness import distance, logits_of_steps
from tests.quantized_checkpoints import build, edit_config

pytestmark = pytest.mark.arithmetic

IDS = torch.arange(3, 15).view(1, 12) * 4 % 128
HF_QUANT_CONFIG = {
    "producer": {"name": "modelopt", "version": "0.33.0"},
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.*.self_attn*"],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build("nvfp4", tmp_path_factory.mktemp("modelopt") / "model")


@pytest.fixture(scope="module")
def expected(folder) -> Tensor:
    """Of unpacked weights; tests/test_quantized.py compares them with stock transformers."""
    return logits(folder, exact=True)


def logits(folder: Path, **options: Any) -> Tensor:
    with MoE(folder, host_memory="50%", dtype="float32", **options) as moe:
        return logits_of_steps(moe.model, IDS)


def edited(folder: Path, into: Path, **changes: Tensor) -> Path:
    """The checkpoint with some tensors added or replaced."""
    into.mkdir()
    for file in folder.glob("*.json"):
        (into / file.name).write_bytes(file.read_bytes())
    save_file(load_file(folder / "model.safetensors") | changes, into / "model.safetensors")
    return into


@pytest.mark.parametrize(
    "method", ["modelopt", "modelopt_fp4", "modelopt_mixed", None, "hf_quant_config.json"]
)
def test_the_config_may_say_so_in_many_ways(folder, expected, method, tmp_path):
    found = edited(folder, tmp_path / "model")
    details: dict[str, object] = {"quant_algo": "NVFP4", "group_size": 16}
    if method == "modelopt_mixed":
        layers = {"model.layers.0.mlp.experts": dict(details)}
        details = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    if method == "hf_quant_config.json":
        edit_config(found, lambda c: {k: v for k, v in c.items() if k != "quantization_config"})
        (found / method).write_text(json.dumps(HF_QUANT_CONFIG))
    else:
        named = details if method is None else details | {"quant_method": method}
        edit_config(found, lambda c: c | {"quantization_config": named})
    assert distance(logits(found), expected) < 1e-4


@pytest.mark.parametrize(
    ("content", "named"),
    [("[]", "not a JSON object"), ('{"x', "not a JSON file"), ("{}", "scales beside it"),
     ('{"quantization": []}', "unnamed"), ('{"quantization": {"quant_algo": 5}}', "quant_algo 5"),
     ('{"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": [1]}}', "malformed")],
)  # fmt: skip
def test_a_malformed_file_is_named(folder, content, named, tmp_path):
    found = edited(folder, tmp_path / "model")
    edit_config(found, lambda c: {k: v for k, v in c.items() if k != "quantization_config"})
    (found / "hf_quant_config.json").write_text(content)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        inspect_checkpoint(str(found))


def test_scales_of_the_cache_and_of_activations_are_not_needed(folder, expected, tmp_path):
    attention = "model.layers.0.self_attn"
    more = {
        f"{attention}.k_proj.k_scale": torch.ones(1), f"{attention}.v_proj.v_scale": torch.ones(()),
        f"{attention}.k_scale": torch.ones(1),
    }  # fmt: skip
    found = edited(folder, tmp_path / "model", **more)
    assert distance(logits(found), expected) < 1e-4


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_global_scale_may_have_any_shape_of_one_number(folder, expected, shape, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    scales = {name: t.view(shape) for name, t in tensors.items() if name.endswith("_scale_2")}
    assert distance(logits(edited(folder, tmp_path / "model", **scales)), expected) < 1e-4


def test_inspect_and_the_report_name_the_format(folder):
    summary = inspect_checkpoint(str(folder))
    assert summary.packing == "modelopt (nvfp4)"
    assert summary.expert_types == {"0-1": "down_proj nvfp4, gate_up_proj nvfp4"}
    with MoE(folder, host_memory="50%") as moe:
        assert moe.report().experts == "modelopt (nvfp4), read by kernels"
        assert "nvfp4" in moe.report().dense_types
