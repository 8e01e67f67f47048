"""tools/make_random_gguf.py: real models' shapes, and the same weights for transformers."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from moe_infinity import MoE
from moe_infinity.gguf.fields import METADATA
from tests.closeness import distance
from tests.gguf_models import COMMON, MODELS, WIDE
from tools import make_random_gguf
from tools.convert_to_gguf import ARCHITECTURES
from tools.gguf_blocks import RandomBlocks
from tools.gguf_types import Shape, types_of
from tools.make_random_gguf import Model, main
from tools.model_shapes import SHAPES, ModelShape
from tools.random_weights import topical_ids

NAMES = ("qwen3_moe", "qwen3_5_moe_text", "gpt_oss", "deepseek_v2", "gemma4_text")
LLAMA_PYTHON = os.environ.get("MOE_INFINITY_LLAMA_PYTHON")
TOLERANCE = 1e-4  # of the largest logit, between two arithmetics in float32
VOCAB = 6144  # of the tokenizer that is written into the file


def made(name: str, mix: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> Path:
    """A file of the tests' small model of this name, and its checkpoint beside it."""
    settings: dict[str, Any] = (
        COMMON
        | MODELS[name]
        | WIDE
        | {
            "vocab_size": VOCAB,
            "vocab_size_per_layer_input": VOCAB,
        }
    )
    shape = ModelShape({"model_type": name} | settings, mix)
    monkeypatch.setitem(SHAPES, "small", shape)
    monkeypatch.setattr(make_random_gguf, "POOL_BYTES", 1 << 16)
    file = folder / f"{mix}.gguf"
    given = ["small", str(file), "--safetensors", str(folder / "model"), *options]
    monkeypatch.setattr(sys, "argv", ["make_random_gguf.py", *given])
    main()
    return file


@pytest.mark.arithmetic
@pytest.mark.grid
@pytest.mark.parametrize("mix", ["q4_k_m", "q8_0", "mxfp4"])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_computes_what_transformers_does_with_its_checkpoint(
    name, mix, tmp_path, monkeypatch
):
    file = made(name, mix, tmp_path, monkeypatch)
    folder = tmp_path / "model"
    ids = torch.tensor([topical_ids(20, VOCAB)])
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = stock(ids).logits
    has_all = ARCHITECTURES[name] in METADATA
    config = None if has_all else str(folder)
    with MoE(file, config_from=config, dtype="float32", device="cpu", exact=True) as moe:
        with torch.no_grad():
            found = moe.model(ids).logits
        assert moe.tokenizer("The old house").input_ids
    assert expected.std() > 0.1
    assert distance(found, expected) < TOLERANCE


def test_fewer_layers_and_experts_are_written_if_asked_for(tmp_path, monkeypatch):
    file = made("qwen3_moe", "q8_0", tmp_path, monkeypatch, "--layers", "1", "--experts", "4")
    shapes = {tensor.name: list(tensor.shape) for tensor in gguf.GGUFReader(file).tensors}
    assert shapes["blk.0.ffn_up_exps.weight"][-1] == 4
    assert not any(name.startswith("blk.1.") for name in shapes)


def test_a_shape_with_all_its_layers_is_as_large_as_the_file_that_people_have():
    """Ten layers or more: transformers pads the numbers of Gemma 4's layers with zeros."""
    given = {"layers": None, "vocab": None, "experts": None, "type": None}
    model = Model(argparse.Namespace(shape="gemma4-26b-a4b", **given))
    total = sum(tensor.num_bytes for tensor in model.tensors)
    assert 15e9 < total < 18e9
    assert {tensor.kind for tensor in model.tensors} >= {Type.Q4_K, Type.Q5_0, Type.Q8_0, Type.Q6_K}


def test_no_two_experts_and_no_two_layers_are_equal(tmp_path, monkeypatch):
    file = made("qwen3_moe", "q4_k_m", tmp_path, monkeypatch)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(file).tensors}
    experts = [
        expert.tobytes() for name, data in tensors.items() if "_exps" in name for expert in data
    ]
    assert len({*experts}) == len(experts) == 2 * 3 * 8


@pytest.mark.parametrize(
    "kind", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "MXFP4", "BF16"]
)
@pytest.mark.parametrize("size", [0.003, 0.02, 1.0])
def test_random_blocks_have_the_size_asked_for_and_no_mean(kind, size):
    blocks = RandomBlocks(Type[kind], 16411, 0).of_size(size)
    weights = gguf.quants.dequantize(blocks, Type[kind]) / size
    assert np.isfinite(weights).all()
    assert abs(weights.std() - 1) < 0.03
    assert abs(weights.mean()) < 0.02


def test_the_mix_has_more_bits_where_llama_cpp_gives_them():
    """The layers of Qwen3-30B-A3B whose values and down projections are Q6_K in its Q4_K_M."""
    shapes: dict[str, Shape] = {"token_embd.weight": (99, 2048), "output.weight": (99, 2048)}
    for layer_idx in range(48):
        shapes[f"blk.{layer_idx}.attn_v.weight"] = (512, 2048)
        shapes[f"blk.{layer_idx}.ffn_down_exps.weight"] = (128, 2048, 768)
        shapes[f"blk.{layer_idx}.ffn_up_exps.weight"] = (128, 768, 2048)
        shapes[f"blk.{layer_idx}.ffn_gate_inp.weight"] = (128, 2048)
    found = types_of(shapes, "q4_k_m")
    finer = [*range(6), *range(8, 42, 3), *range(42, 48)]
    for leaf in ("attn_v", "ffn_down_exps"):
        of_leaf = [found[f"blk.{layer_idx}.{leaf}.weight"] for layer_idx in range(48)]
        assert [at for at, kind in enumerate(of_leaf) if kind == Type.Q6_K] == finer
    assert {found["blk.1.ffn_up_exps.weight"], found["token_embd.weight"]} == {Type.Q4_K}
    assert found["output.weight"] == Type.Q6_K
    assert found["blk.0.ffn_gate_inp.weight"] == Type.F32


@pytest.mark.skipif(LLAMA_PYTHON is None, reason="MOE_INFINITY_LLAMA_PYTHON is not set")
# llama.cpp takes a DeepSeek-V2 without a low rank of queries only with 27 layers.
@pytest.mark.parametrize("name", ["deepseek_v3", *(name for name in NAMES if "seek" not in name)])
def test_types_are_those_of_llama_cpp_s_quantizer(name, tmp_path, monkeypatch):
    file = made(name, "bf16", tmp_path, monkeypatch)
    tool = Path(make_random_gguf.__file__).with_name("quantize_gguf.py")
    quantized = tmp_path / "quantized.gguf"
    command = [str(LLAMA_PYTHON), str(tool), str(file), str(quantized), "q4_k_m"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    expected = {t.name: t.tensor_type for t in gguf.GGUFReader(quantized).tensors}
    written = gguf.GGUFReader(file).tensors
    shapes = {t.name: tuple(map(int, t.shape[::-1])) for t in written}
    assert types_of(shapes, "q4_k_m") == expected
