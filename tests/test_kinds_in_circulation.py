"""Configs as their makers publish them, which transformers reads: other names of classes and of
activations, and dtypes of a part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.loading.kind import find_kind
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import PROMPT, tiny_model


def published(family: str, class_name: str, folder: Path, **changes: Any) -> Path:
    """A tiny model, with a config that says something else."""
    (architecture,) = [each for each in architectures_in(family) if each.name == class_name]
    tiny_model(architecture).save_pretrained(folder)
    file = folder / "config.json"
    content = json.loads(file.read_text("utf-8"))
    for name, value in changes.items():
        if isinstance(value, dict):
            content[name] = content.get(name, {}) | value
        else:
            content[name] = value
    file.write_text(json.dumps(content), "utf-8")
    return folder


@pytest.mark.parametrize("architectures", [["Glm4vMoeForGeneration"], None])
def test_a_class_of_images_and_text_goes_by_the_config(architectures, tmp_path):
    name = "Glm4vMoeForConditionalGeneration"
    folder = published("glm4v_moe", name, tmp_path, architectures=architectures)
    assert find_kind(str(folder)).model_class.__name__ == name


def test_an_activation_that_a_config_of_transformers_replaces_is_no_fault(tmp_path):
    transformers = pytest.importorskip("transformers.models.minimax_m3_vl")
    assert transformers is not None
    folder = published(
        "minimax_m3_vl",
        "MiniMaxM3SparseForConditionalGeneration",
        tmp_path,
        text_config={"hidden_act": "swigluoai"},
    )
    with MoE(folder, host_memory="50%") as moe, torch.no_grad():
        assert bool(moe.model(PROMPT[:1]).logits.isfinite().all())


def test_packed_weights_are_unpacked_to_the_dtype_of_the_part_that_says_one(tmp_path):
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    folder = published(
        "glm4v_moe",
        "Glm4vMoeForConditionalGeneration",
        tmp_path,
        text_config={"dtype": "float16"},
        quantization_config=awq,
        dtype=None,
    )
    kind = find_kind(str(folder))
    assert (kind.compute_dtype("auto"), kind.compute_dtype("float32")) == ("float16", "float32")
