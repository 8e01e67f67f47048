"""Tiny models that see, as a checkpoint and as two GGUF files."""

from __future__ import annotations

import dataclasses
import string
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.images.eyes import EYES, QWEN_PIXELS, Eyes
from tests.images.tiny_eyes import CHATML, save_checkpoint
from tests.sweep import tiny
from tools.convert_mmproj import convert as convert_vision
from tools.convert_mmproj import text_of
from tools.convert_to_gguf import convert

GEMMA_NAMES = {
    "<image>": "<|image|>", "<boi>": "<|image>", "<eoi>": "<image|>", "<audio>": "<|audio|>",
    "<boa>": "<|audio>", "<eoa>": "<audio|>", "<|video|>": "<|video|>",
}  # fmt: skip


def gemma_config(ids: dict[str, int]) -> dict[str, Any]:
    """As the published model with routed experts: images are seen from both sides, and linear
    layers clip.
    """
    found = EYES["gemma4"].config({old: ids[new] for old, new in GEMMA_NAMES.items()})
    found["text_config"] |= {"use_bidirectional_attention": "vision"}
    found["vision_config"] |= {"use_clipped_linears": True, "standardize": True}
    return found


MODELS = {
    "gemma4": dataclasses.replace(
        EYES["gemma4"],
        tokens=tuple(GEMMA_NAMES.values()),
        place="<|image|>",
        config=gemma_config,
        processor={
            "image_processor_type": "Gemma4ImageProcessor",
            "image_mean": [0.0, 0.0, 0.0],
            "image_std": [1.0, 1.0, 1.0],
        },
        tokenizer={k: GEMMA_NAMES[v] for k, v in EYES["gemma4"].tokenizer.items()},
    ),
    "qwen3_5_moe": dataclasses.replace(
        EYES["qwen3_5_moe"],
        processor=QWEN_PIXELS | {"size": {"shortest_edge": 256**2, "longest_edge": 4096**2}},
    ),
}


def save_letters(eyes: Eyes, folder: Path) -> dict[str, int]:
    """A tokenizer of bytes with one merge, which a GGUF file can have. Returns the ids."""
    letters = ["Ġ", "Ċ", *string.digits, *string.ascii_letters, *string.punctuation, "th"]
    words = ["<pad>", "<unk>", *eyes.tokens, *letters]
    ids = {word: at for at, word in enumerate(words)}
    assert len(ids) <= tiny.VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(ids, [("t", "h")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = words[: -len(letters)]
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        chat_template=CHATML.replace("PLACE", eyes.place),
        extra_special_tokens=eyes.tokenizer,
    ).save_pretrained(folder)
    return ids


class Files(NamedTuple):
    """One model in both forms."""

    stock: Path  # folder of a checkpoint
    text: Path  # GGUF files
    mmproj: Path


def save_files(name: str, folder: Path, wanted: str = "f32") -> Files:
    """The vision part lies beside the text model."""
    eyes = MODELS[name]
    stock = save_checkpoint(eyes, folder / "stock", save_letters)
    file = stock / "model.safetensors"
    dice = torch.Generator().manual_seed(1)
    weights = load_file(file)
    for key, weight in weights.items():
        if weight.ndim == 0:  # a limit of a linear layer that clips
            size = 0.5 + torch.rand((), generator=dice)
            weights[key] = -size if key.endswith("_min") else size
        elif "std_" in key:
            weights[key] = torch.rand(weight.shape, generator=dice) + 0.5
    save_file(weights, file, {"format": "pt"})
    out = folder / "gguf"
    out.mkdir()
    convert(text_of(stock, folder / "text"), out / "model.gguf", wanted)
    mmproj = convert_vision(stock, out / "mmproj-F32.gguf")
    return Files(stock, out / "model.gguf", mmproj)
