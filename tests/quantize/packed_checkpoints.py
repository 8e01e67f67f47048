"""Checkpoints packed by `moe-infinity pack` in tests: the source, and plain ways to read what was
written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from moe_infinity.quantize.pack import PackReport, pack_checkpoint
from tests import conftest
from tests.architectures.test_architectures import SMALL
from tests.slow_unpack import numbers_of, unpack_groups

SHARD_BYTES = 100_000  # several shards of the tiny model
LEFT_OUT = (  # of the files beside the weights
    "pytorch_model.bin", "consolidated.pth", ".hidden", "SHA256SUMS",
)  # fmt: skip


def make_source(folder: Path) -> Path:
    """A tiny random Qwen3-MoE with files of all kinds beside it."""
    model = conftest.make_model(hidden_size=64, moe_intermediate_size=64)
    model.save_pretrained(folder)
    conftest.save_tokenizer(folder)
    (folder / "README.md").write_text("what the model is\n")
    (folder / "code").mkdir()
    (folder / "code" / "modeling.py").write_text("pass\n")
    for name in LEFT_OUT:
        (folder / name).write_text("not to be copied")
    return folder


def pack(source: Path, folder: Path, **options: Any) -> PackReport:
    """To int8 if not told otherwise."""
    defaults: dict[str, Any] = {"experts": "int8", "shard_bytes": SHARD_BYTES}
    return pack_checkpoint(str(source), folder, **defaults | options)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Of all shards, as the safetensors library reads them."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def plainly_unpacked(folder: Path) -> dict[str, Tensor]:
    """The weights in bfloat16, by the definitions of the formats, one after the other."""
    tensors = tensors_of(folder)
    unpacked = {}
    for name, tensor in tensors.items():
        if name.endswith("_packed"):
            stem = name.removesuffix("_packed")
            unpacked[stem] = _from_words(tensor, tensors[f"{stem}_scale"])
            if tensor.ndim == 2:
                assert tensors[f"{stem}_shape"].tolist() == list(unpacked[stem].shape)
        elif f"{name}_scale" in tensors:
            unpacked[name] = (tensor.float() * tensors[f"{name}_scale"]).bfloat16()
        elif not name.startswith("padding.") and not name.endswith(("_scale", "_shape")):
            unpacked[name] = tensor
    return unpacked


def _from_words(words: Tensor, scales: Tensor) -> Tensor:
    if words.ndim == 3:
        pairs = zip(words, scales, strict=True)
        return torch.stack([_from_words(*of_one_expert) for of_one_expert in pairs])
    nibbles = numbers_of(words, 1)
    groups = torch.arange(nibbles.shape[1]) // (nibbles.shape[1] // scales.shape[1])
    return unpack_groups(nibbles, torch.full(scales.shape, 8), scales, groups)


def everything_in(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def save_random(name: str, folder: Path, **sizes: Any) -> Path:
    """A tiny causal model of this architecture."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL | sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(std=0.15)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
