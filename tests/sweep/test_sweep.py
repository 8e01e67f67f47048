"""Every architecture of the installed transformers with routed experts gives stock's bits with few
expert slots, and other bits with wrong experts.

All of them take over a minute, so most are marked slow; the others are one of each kind.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_infinity import MoE, MoEInfinityError
from moe_infinity.kernels.cpu.linear import FusedLinear
from tests.sweep import tiny
from tests.sweep.compare import difference, rows_of
from tests.sweep.discover import Architecture, architectures_in, modelling_files
from tests.sweep.overrides import NOT_COMPARED
from tests.sweep.runners import outcome

pytestmark = pytest.mark.arithmetic

FAST = {  # beside those of tests/architectures/test_architectures.py
    "dbrx": "outside the interface, experts are row blocks of a matrix",
    "deepseek_v4": "routed by token id, float32",
    "gemma4": "experts directly in the decoder layer; text and multimodal",
    "jamba": "hybrid cache, experts in every second layer",
    "longcat_flash": "experts without weights",
    "nemotron_h": "no gate, a latent width",
    "qwen3_vl_moe": "multimodal, fused and transposed",
    "zaya": "one expert per token, router with a state",
}
WITHOUT_SHORT_STEPS = ("diffusion_gemma",)  # it refines a canvas of tokens at once


@pytest.mark.sample(3)
@pytest.mark.sweep(FAST)
def test_few_slots_give_the_bits_of_stock_and_wrong_experts_do_not(folder, tmp_path):
    rows = rows_of(folder, tmp_path)
    assert folder not in FAST or any(row.is_supported for row in rows), rows
    for row in rows:
        name = row.model_class
        if name in NOT_COMPARED:
            assert row.result == NOT_COMPARED[name][0], row
        else:
            assert row.is_supported or row.result == "not generating", row


KERNELS = ("deepseek_v3", "gpt_oss", "qwen3_vl_moe", "zaya")


@pytest.mark.sample(3)
@pytest.mark.sweep(KERNELS)
def test_steps_by_kernels_give_the_same_but_for_rounding(folder, tmp_path, monkeypatch):
    """transformers 5.17: linear layers of all 70 classes that load, experts of 62."""
    products: list[int] = []
    multiply = FusedLinear.__call__

    def counted(self: FusedLinear, x: torch.Tensor, *biases: Any) -> torch.Tensor:
        products.append(len(x))
        return multiply(self, x, *biases)

    monkeypatch.setattr(FusedLinear, "__call__", counted)
    for architecture in architectures_in(folder):
        checkpoint = tmp_path / architecture.name
        torch.manual_seed(0)
        tiny.tiny_model(architecture).save_pretrained(checkpoint)
        found = {}
        try:
            for is_exact in (True, False):
                with (
                    MoE(
                        checkpoint,
                        host_memory="50%",
                        dtype="float32",
                        exact=is_exact,
                    ) as moe,
                    torch.no_grad(),
                ):
                    found[is_exact] = outcome(moe.model, moe.generate)
        except MoEInfinityError:
            assert folder not in KERNELS
            continue
        assert not difference(found[False], found[True], 1e-4)
        assert products or folder in WITHOUT_SHORT_STEPS
        products.clear()


@pytest.mark.slow
def test_every_class_behind_the_experts_interface_is_in_the_sweep():
    models = Path(transformers.__file__).parent / "models"
    behind = {
        file.parent.name
        for file in models.glob("*/modeling_*.py")
        if "@use_experts_implementation" in file.read_text("utf-8")
    }
    assert len(behind) > 40
    assert behind <= set(modelling_files())


def only_architecture(folder: str) -> Architecture:
    (architecture,) = architectures_in(folder)
    return architecture


@pytest.mark.parametrize(
    ("folder", "pattern"),
    [
        ("mixtral", r"model\.layers\.0\.block_sparse_moe\.experts\.7\.w1\.weight"),
        ("qwen3_moe", r"model\.layers\.0\.mlp\.experts\.7\.gate_proj\.weight"),
        ("gpt_oss", r"model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        ("dbrx", r"transformer\.blocks\.0\.ffn\.experts\.mlp\.w1"),
    ],
)
def test_tiny_checkpoints_have_the_published_layout(folder, pattern, tmp_path):
    tiny.tiny_model(only_architecture(folder)).save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert any(re.fullmatch(pattern, name) for name in names), sorted(names)


def test_two_experts_swapped_in_the_checkpoint_are_noticed(tmp_path):
    architecture = only_architecture("mixtral")
    tiny.tiny_model(architecture).save_pretrained(tmp_path)
    stock = architecture.model_class.from_pretrained(tmp_path, dtype="auto")
    theirs = outcome(stock, stock.generate)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    first, second = (f"model.layers.2.block_sparse_moe.experts.{e}.w2.weight" for e in (0, 1))
    swapped = {**tensors, first: tensors[second].clone(), second: tensors[first].clone()}
    file.unlink()
    save_file(swapped, file, metadata={"format": "pt"})
    with MoE(tmp_path, host_memory="25%", exact=True) as moe:
        assert "prefill" in difference(outcome(moe.model, moe.generate), theirs, 0.0)


def test_a_difference_is_named_and_measured_against_the_tolerance():
    theirs = {"prefill": torch.tensor([1.0, -4.0])}
    assert difference({"prefill": torch.tensor([1.0, -4.0])}, theirs, 0.0) == ""
    ours = {"prefill": torch.tensor([1.5, -4.0])}
    assert difference(ours, theirs, 0.0) == "prefill by 5.0e-01"
    assert difference(ours, theirs, 0.125) == ""
    assert difference(ours, theirs, 0.1) == "prefill by 5.0e-01"
    assert difference({"prefill": torch.tensor([torch.nan, -4.0])}, theirs, 0.5)
    assert difference({"prefill": torch.tensor([1.0])}, theirs, 0.5)
