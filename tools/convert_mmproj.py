"""Write the vision part of a checkpoint as GGUF, as llama.cpp's converter does with --mmproj.

    python tools/convert_mmproj.py MODEL mmproj.gguf     # needs the gguf package

The text part is written by convert_to_gguf.py, of a checkpoint of the text model alone: text_of()
makes one. Weights are float32, or float16 where they are matrices and `--type f16` says so.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from safetensors import safe_open
from torch import Tensor

PATCHES = "v.patch_embd.weight"
ENDS = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
Named = tuple[str, Tensor]


def text_of(folder: Path, out: Path) -> Path:
    """A checkpoint of the text model alone, in float32, with the tokenizer of the whole."""
    whole = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    config = whole.config.get_text_config()
    text = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).to(torch.float32)
    text.model.load_state_dict(whole.model.language_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    text.save_pretrained(out)
    for file in (*folder.glob("*token*"), *folder.glob("chat_template*")):
        (out / file.name).write_bytes(file.read_bytes())
    return out


def qwen(name: str, weight: Tensor, names: Any) -> Iterator[Named]:
    """conversion/qwen3vl.py: two frames of patches, and names of the merger."""
    name = name.replace("model.visual.", "visual.")
    merger = {"visual.merger.norm": "v.post_ln", "visual.merger.linear_fc1": "mm.0",
              "visual.merger.linear_fc2": "mm.2"}  # fmt: skip
    module, _, suffix = name.rpartition(".")
    if name == "visual.patch_embed.proj.weight":
        yield PATCHES, weight[:, :, 0]
        yield f"{PATCHES}.1", weight[:, :, 1]
    elif module in merger:
        yield f"{merger[module]}.{suffix}", weight
    else:
        yield names.get_name(name, ENDS), weight


def gemma4(name: str, weight: Tensor, names: Any) -> Iterator[Named]:
    """conversion/gemma.py: patches have their colours first, and scalars a dimension."""
    name = name.replace("model.vision_tower.encoder.", "vision_model.model.")
    name = name.replace(".linear.weight", ".weight")
    if name.endswith("position_embedding_table"):
        name += ".weight"
    if name.endswith("patch_embedder.input_proj.weight"):
        size = int((weight.shape[1] // 3) ** 0.5)
        weight = weight.reshape(-1, size, size, 3).permute(0, 3, 1, 2)
    yield names.get_name(name, ENDS), weight.reshape(weight.shape or (1,))


KINDS: dict[str, tuple[str, Any]] = {
    "qwen3_5_moe": ("qwen3vl_merger", qwen), "gemma4": ("gemma4v", gemma4),
}  # fmt: skip


def metadata_of(config: dict[str, Any], processor: dict[str, Any]) -> dict[str, Any]:
    """The keys of the vision part."""
    vision, text = config["vision_config"], config["text_config"]
    is_qwen = config["model_type"] == "qwen3_5_moe"
    found: dict[str, Any] = {
        "clip.has_vision_encoder": True,
        "clip.vision.projection_dim": text["hidden_size"],
        "clip.vision.image_size": 224,
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.block_count": vision["depth" if is_qwen else "num_hidden_layers"],
        "clip.vision.attention.head_count": vision[
            "num_heads" if is_qwen else "num_attention_heads"
        ],
        "clip.vision.image_mean": processor.get("image_mean", [0.0] * 3),
        "clip.vision.image_std": processor.get("image_std", [1.0] * 3),
    }
    if not is_qwen:
        return found | {
            "clip.vision.projector_type": KINDS["gemma4"][0],
            "clip.vision.attention.layer_norm_epsilon": 1e-6,
        }
    image_size = int(vision["num_position_embeddings"] ** 0.5 * vision["patch_size"])
    return found | {
        "clip.projector_type": KINDS["qwen3_5_moe"][0],
        "clip.use_gelu": True,
        "clip.vision.image_size": image_size,
        "clip.vision.spatial_merge_size": vision["spatial_merge_size"],
        "clip.vision.attention.layer_norm_epsilon": text["rms_norm_eps"],
        "clip.vision.is_deepstack_layers": [False] * vision["depth"],
    }


def convert(folder: Path, out: Path, wanted: str = "f32", **more: Any) -> Path:
    """Write the vision part of a checkpoint. `more` are metadata beside those of the converter."""
    config = json.loads((folder / "config.json").read_text())
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 128)
    of_kind = KINDS[config["model_type"]][1]
    writer = gguf.GGUFWriter(out, "clip")
    writer.add_type("mmproj")
    for key, value in (metadata_of(config, processor) | more).items():
        is_whole = type(value) is int
        kind = gguf.GGUFValueType.UINT32 if is_whole else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if re.search(r"language_model\.|^lm_head|\.audio_tower\.|embed_audio", name):
                    continue
                for target, weight in of_kind(name, opened.get_tensor(name), names):
                    is_matrix = weight.ndim > 1 and "position_embd" not in target
                    dtype = np.float16 if wanted == "f16" and is_matrix else np.float32
                    writer.add_tensor(target, weight.contiguous().float().numpy().astype(dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a checkpoint's vision part as GGUF")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=("f32", "f16"), default="f16")
    args = parser.parse_args()
    convert(args.model, args.out, args.type)


if __name__ == "__main__":
    main()
