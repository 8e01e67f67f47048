"""What a new quantized format needs: one entry, TOY, and one kernel loader, `load_bytes`: 16 lines
together, and a line each to register them. The rest of this file writes a checkpoint and looks at
logits.

The toy format stores bytes that stand for themselves less 128, and one scale for a whole weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.checkpoint.packing import PartFormat, WeightFormat
from moe_infinity.formats import methods as formats
from moe_infinity.kernels.cpu import experts as experts_cpu
from moe_infinity.kernels.cpu import steps
from moe_infinity.kernels.cpu.vectors import FLOATS, I8, I32, LANES, all_lanes, load, vector_of
from tests.closeness import distance, logits_of_steps
from tests.quantized_checkpoints import QWEN3_MOE, edit_config

pytestmark = pytest.mark.arithmetic

IDS = torch.arange(3, 15).view(1, 12) * 4 % 128
# Of the largest logit, in float32: the kernel multiplies sums by the scale, not each weight.
TOLERANCE = 1e-4
UNPACKED = {"experts_implementation": "grouped_mm"}

TOY = WeightFormat(
    name="toy",
    kind="toy",
    parts=(
        PartFormat("values", "", frozenset({"U8"})),
        PartFormat("scale", "_scale", frozenset({"F32"})),
    ),
    measure=lambda shapes: (shapes["values"], (shapes["values"][0], shapes["values"][1])),
    unpack=lambda parts, block, dtype: ((parts["values"].float() - 128) * parts["scale"]).to(dtype),
)


def load_bytes(b: Any, num_vectors: int, at: Any) -> list[Any]:
    vectors = []
    for k in range(num_vectors):
        numbers = b.zext(load(b, at, LANES * k, I8), vector_of(I32))
        vectors.append(b.sitofp(b.sub(numbers, all_lanes(I32, 128)), FLOATS))
    return vectors


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(formats.FORMATS, "toy", formats.Method("bytes", lambda config: (TOY,)))
    monkeypatch.setitem(steps.LOADERS, "toy", steps.ValueLoader(8, (8, 4, 2), load_bytes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A checkpoint in the toy format, and the weights it stands for."""
    root = tmp_path_factory.mktemp("toy")
    packed, plain = root / "packed", root / "plain"
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**QWEN3_MOE))
    for param in model.parameters():
        if param.ndim > 1:
            param.data.normal_(std=0.15)
    for folder in (packed, plain):
        model.save_pretrained(folder)
    tensors = load_file(plain / "model.safetensors")
    stored, meant = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if ".experts." in name:
            scale = weight.abs().max().view(1) / 127
            stored[name] = ((weight / scale).round() + 128).to(torch.uint8)
            stored[f"{name}_scale"] = scale
            meant[name] = (stored[name].float() - 128) * scale
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(meant, plain / "model.safetensors", {"format": "pt"})
    edit_config(packed, lambda c: c | {"quantization_config": {"quant_method": "toy"}})
    return packed, plain


def logits_of(folder: Path, **options: Any) -> tuple[Tensor, str]:
    """And what the report says of the experts."""
    with MoE(folder, host_memory="50%", dtype="float32", **options) as moe:
        found = logits_of_steps(moe.model, IDS)
        moe.check_invariants()
        return found, moe.report().experts


def test_an_entry_and_a_loader_make_a_format(toy, folders):
    packed, plain = folders
    expected, _ = logits_of(plain, **UNPACKED)
    assert torch.equal(logits_of(packed, **UNPACKED)[0], expected)
    with mock.patch.object(
        experts_cpu.FusedRows, "compute", autospec=True, side_effect=experts_cpu.FusedRows.compute
    ) as fused:
        found, experts = logits_of(packed)
    assert fused.called
    assert experts == "toy, read by kernels"
    assert distance(found, expected) < TOLERANCE


def test_without_a_loader_the_weights_are_unpacked_and_a_warning_says_so(
    toy, folders, monkeypatch, caplog
):
    packed, plain = folders
    logits_of(packed)
    assert "unpacks them" not in caplog.text
    monkeypatch.delitem(steps.LOADERS, "toy")
    found, experts = logits_of(packed)
    assert experts == "toy, unpacked"
    assert "types: toy" in caplog.text
    assert distance(found, logits_of(plain, **UNPACKED)[0]) < TOLERANCE


def test_the_tolerance_rejects_a_loader_that_is_off_by_one(toy, folders, monkeypatch):
    def off(b: Any, num_vectors: int, at: Any) -> list[Any]:
        return [b.fadd(v, FLOATS([1.0] * LANES)) for v in load_bytes(b, num_vectors, at)]

    monkeypatch.setitem(steps.LOADERS, "toy", steps.ValueLoader(8, (2,), off))  # compiled anew
    packed, plain = folders
    expected, _ = logits_of(plain, **UNPACKED)
    assert distance(logits_of(packed)[0], expected) > 10 * TOLERANCE
