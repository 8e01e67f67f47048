"""Experts that quantizers took apart: linear layers, where transformers' class has them stacked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.errors import CheckpointError
from moe_infinity.quantize.pack import pack_checkpoint
from tests.closeness import distance
from tests.quantized_checkpoints import CHECKPOINTS, COMMON, GPT_OSS, edit_config
from tests.slow_unpack import dequantized

pytestmark = pytest.mark.arithmetic

LLAMA4 = COMMON | {
    "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96,
    "intermediate_size_mlp": 96, "interleave_moe_layer_step": 1, "attention_chunk_size": 64,
}  # fmt: skip
MODELS = {"GptOss": ("GptOss", GPT_OSS), "Llama4": ("Llama4Text", LLAMA4)}
IDS = torch.arange(3, 3 + 26).view(2, 13) * 4 % 128
NUM_EXPERTS = 8
FILE = "model.safetensors"
ROUNDED = 3e-3  # the stacked weights are those of packed ones in bfloat16
READ_BY_KERNELS = ("fp8 per tensor", "gptq", "auto-round", "mxfp4 packed")
NO_KERNEL = "kernels do not read its weights"  # so small int4, and stacked ones [C, R]


def linears_of(name: str) -> list[str]:
    """The names of the linear layers' tensors that one stacked tensor becomes, of expert 0."""
    start, _, key = name.rpartition(".")
    suffix = "bias" if key.endswith("_bias") else "weight"
    kind = key.removesuffix("_bias")
    linears = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    return [f"{start}.0.{linear}.{suffix}" for linear in linears]


def of_expert(name: str, expert: int) -> str:
    return name.replace(".experts.0.", f".experts.{expert}.")


def apart(stacked: dict[str, Tensor], *, in_turn: bool) -> dict[str, Tensor]:
    found = {}
    for name, tensor in stacked.items():
        linears = linears_of(name)
        for expert, whole in enumerate(tensor):
            parts = [whole]
            if len(linears) == 2:
                parts = [whole[..., ::2], whole[..., 1::2]] if in_turn else [*whole.chunk(2, -1)]
            for linear, part in zip(linears, parts, strict=True):
                found[of_expert(linear, expert)] = part.t().contiguous()
    return found


def together(names: list[str], tensors: dict[str, Tensor], *, in_turn: bool) -> dict[str, Tensor]:
    """What `apart` undoes: the stacked tensors of these names."""
    found = {}
    for name in names:
        stacks = [
            torch.stack([tensors[of_expert(linear, expert)].t() for expert in range(NUM_EXPERTS)])
            for linear in linears_of(name)
        ]
        whole = stacks[0]
        if len(stacks) == 2:
            whole = torch.stack(stacks, -1).flatten(-2) if in_turn else torch.cat(stacks, -1)
        found[name] = whole.contiguous()
    return found


def written(model: str, way: str | None, folder: Path) -> tuple[Path, Path]:
    """A folder with linear experts, packed in a way of CHECKPOINTS, and one for stock transformers
    with the same numbers in stacked ones.
    """
    family, settings = MODELS[model]
    in_turn = model == "GptOss"
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    made = getattr(transformers, f"{model}ForCausalLM")(config)
    with torch.no_grad():
        for param in made.parameters():
            param.normal_(std=0.15)
    linear, stacked = folder / "linear", folder / "stacked"
    made.to(torch.bfloat16).save_pretrained(linear)
    tensors = load_file(linear / FILE)
    experts = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    others = {name: tensor for name, tensor in tensors.items() if name not in experts}
    for name, weight in apart(experts, in_turn=in_turn).items():
        if way is None or name.endswith(".bias"):
            others[name] = weight
            continue
        for suffix, part in CHECKPOINTS[way][2](weight).items():
            others[name.removesuffix(".weight") + suffix] = part.contiguous()
    save_file(others, linear / FILE, {"format": "pt"})
    if way is not None:
        quantization = {"quantization_config": CHECKPOINTS[way][1]}
        edit_config(linear, lambda config: config | quantization)
        dequantized(linear, stacked)
    else:
        made.save_pretrained(stacked)
    plain = load_file(stacked / FILE)
    whole = {name: tensor for name, tensor in plain.items() if ".experts." not in name}
    if way is not None:
        whole |= together(list(experts), plain, in_turn=in_turn)
        save_file(whole, stacked / FILE, {"format": "pt"})
    return linear, stacked


@pytest.mark.parametrize(
    "way", [None, "fp8 per tensor", "gptq", "auto-round", "awq", "int4 symmetric", "mxfp4 packed"]
)
@pytest.mark.parametrize("model", MODELS)
def test_they_compute_what_stacked_ones_do(model, way, tmp_path):
    linear, stacked = written(model, way, tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(stacked, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = stock(IDS).logits
        for options in ({}, {"host_memory": "25%"}, {"exact": True}):
            with MoE(linear, dtype="float32", **options) as moe:
                found = moe.model(IDS).logits
                paths = [count.taken for count in moe.report().paths]
            assert distance(found, expected) < (1e-5 if way is None else ROUNDED)
            if "exact" not in options:
                reasons = [path.reason for path in paths if path.kind == "experts"]
                assert reasons == [None if way in READ_BY_KERNELS else NO_KERNEL]


def test_names_of_llm_compressor(tmp_path):
    """Whose module of linear experts is inside the one that it replaces."""
    linear, stacked = written("GptOss", "fp8 per tensor", tmp_path)
    tensors = load_file(linear / FILE)
    twice = {name.replace(".experts.", ".experts.experts."): t for name, t in tensors.items()}
    with MoE(linear, dtype="float32") as moe, torch.no_grad():
        expected = moe.model(IDS).logits
    save_file(twice, linear / FILE, {"format": "pt"})
    with MoE(linear, dtype="float32") as moe, torch.no_grad():
        assert torch.equal(moe.model(IDS).logits, expected)


def test_the_packer_takes_them(tmp_path):
    linear, _ = written("GptOss", None, tmp_path)
    pack_checkpoint(str(linear), tmp_path / "packed", experts="int8")
    with torch.no_grad():
        with MoE(linear, dtype="float32") as moe:
            expected = moe.model(IDS).logits
        with MoE(tmp_path / "packed", dtype="float32") as moe:
            assert distance(moe.model(IDS).logits, expected) < 0.05


def test_one_that_is_not_there_is_named(tmp_path):
    linear, _ = written("GptOss", None, tmp_path)
    tensors = load_file(linear / FILE)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, linear / FILE, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.gate_up_proj: 8 experts"):
        MoE(linear)
