"""Compare a GGUF file of convert_to_gguf.py with the one that llama.cpp's converter makes.

    python tools/compare_with_llama_converter.py LLAMA_CPP MODEL OURS.gguf THEIRS.gguf [--mmproj]

LLAMA_CPP is a source tree of llama.cpp, such as vendor/llama.cpp of llama-cpp-python's sdist, and
MODEL a tiny checkpoint. Prints tensors that one file lacks or that differ, and keys with other
values. `--fields` is JSON with what a published config.json says and transformers does not save;
`--mmproj` is for vision parts, which convert_mmproj.py writes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch


def convert(model: Path, out: Path, *, mmproj: bool) -> None:
    """Run llama.cpp's converter on a checkpoint without a tokenizer."""
    gguf = importlib.import_module("gguf")
    config = json.loads((model / "config.json").read_text())
    converter: Any = importlib.import_module("conversion").get_model_class(
        config["architectures"][0], mmproj=mmproj
    )

    def set_vocab(self: Any) -> None:
        self.gguf_writer.add_tokenizer_model("no_vocab")
        text = config.get("text_config", config)
        self.gguf_writer.add_vocab_size(text["vocab_size"])

    converter.set_vocab = set_vocab
    converter.no_mtp = True
    with torch.inference_mode():
        converter(model, gguf.LlamaFileType.ALL_F32, out).write()


def differences(theirs: Path, ours: Path) -> list[str]:
    """Return a line for each tensor and key that differs."""
    gguf = importlib.import_module("gguf")
    readers = [gguf.GGUFReader(file) for file in (theirs, ours)]
    tensors = [{tensor.name: tensor for tensor in reader.tensors} for reader in readers]
    lines = [f"only theirs: {name}" for name in tensors[0] if name not in tensors[1]]
    lines += [f"only ours: {name}" for name in tensors[1] if name not in tensors[0]]
    for name in tensors[0].keys() & tensors[1].keys():
        stored = [each[name] for each in tensors]
        is_whole = stored[0].tensor_type == gguf.GGMLQuantizationType.I32
        values = (lambda data, kind: data) if is_whole else gguf.quants.dequantize
        weights = [values(each.data, each.tensor_type) for each in stored]
        same_shape = stored[0].shape.tolist() == stored[1].shape.tolist()
        if not same_shape or not np.allclose(weights[0], weights[1], rtol=1e-6):
            lines.append(f"{name}: {stored[0].shape.tolist()}, ours {stored[1].shape.tolist()}")
    fields = [
        {key: field.contents() for key, field in reader.fields.items() if key[0].islower()}
        for reader in readers
    ]
    for key in sorted(fields[0].keys() | fields[1].keys()):
        values = [each.get(key, "absent") for each in fields]
        if values[0] != values[1] and not key.startswith("general."):
            lines.append(f"{key}: {values[0]}, ours {values[1]}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a file with llama.cpp's converter")
    for name in ("llama_cpp", "model", "ours", "theirs"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--fields", type=json.loads, default={})
    parser.add_argument("--mmproj", action="store_true")
    args = parser.parse_args()
    sys.path[:0] = [str(args.llama_cpp / "gguf-py"), str(args.llama_cpp)]
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(shutil.copytree(args.model, Path(scratch) / "model"))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | args.fields))
        convert(model, args.theirs, mmproj=args.mmproj)
    print(*differences(args.theirs, args.ours), sep="\n")


if __name__ == "__main__":
    main()
