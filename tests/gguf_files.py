"""Tiny random models as GGUF files, and headers written byte by byte.

build(name, folder) writes a checkpoint of one of gguf_models.py, to be converted by
tools/convert_to_gguf.py.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from tests.gguf_models import COMMON, MODELS


def class_for(config_class: Any) -> Any:
    """The model's class: of some models transformers has one only for text and images."""
    text = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    both = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return (text if config_class in text else both)[config_class]


def stock_model(folder: Path) -> Any:
    """The model of a checkpoint as transformers loads it, in float32."""
    config = transformers.AutoConfig.from_pretrained(folder)
    return class_for(type(config)).from_pretrained(folder, dtype=torch.float32).eval()


def build(name: str, folder: Path, **changes: Any) -> Path:
    """A checkpoint in which no parameter is 0, so that one left out is seen."""
    settings = COMMON | MODELS[name]
    settings = settings | changes
    if "vision_config" in settings:
        text = {key: value for key, value in settings.items() if key != "vision_config"}
        settings = {"text_config": text, "vision_config": settings["vision_config"]}
    config = transformers.AutoConfig.for_model(name, **settings)
    torch.manual_seed(0)
    model = class_for(type(config))(config)
    for key, param in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith("tid2eid"):  # other experts for each token
            param.data = torch.rand(len(param), 8).topk(param.shape[1]).indices
        if param.is_floating_point() and "inv_freq" not in key:
            is_scale = "norm" in key or "scal" in key
            torch.nn.init.normal_(param.data, 1.0 if is_scale else 0.0, 0.1)
    model.save_pretrained(folder)
    return folder


def widen(file: Path, out: Path) -> Path:
    """The same model with every weight as gguf's `dequantize` gives it, in float32."""
    reader = gguf.GGUFReader(file)
    writer = _writer(reader, out, {})
    for tensor in reader.tensors:
        shape = [int(size) for size in tensor.shape[::-1]]
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(weight, np.float32).reshape(shape))
    return _written(writer, out)


def rewrite(file: Path, out: Path, changes: Mapping[str, Any], **tensors: Any) -> Path:
    """The same model with other metadata: a value is a string, a bool, a list of numbers or
    strings, a pair of a type and a number, or None to leave the key out. `tensors` are arrays, or
    pairs of an array and a type, beside those that there are, or None to leave one out.
    """
    reader = gguf.GGUFReader(file)
    writer = _writer(reader, out, changes)
    stored = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    for name, tensor in (stored | tensors).items():
        if tensor is not None:
            data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
            writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind)
    return _written(writer, out)


def _writer(reader: gguf.GGUFReader, out: Path, changes: Mapping[str, Any]) -> gguf.GGUFWriter:
    """With the metadata, those that are to change changed."""
    architecture = changes.get("general.architecture")
    own = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(out, str(architecture or own))
    for field in reader.fields.values():
        done = field.name == "general.architecture" or field.name in changes
        if done or field.name.startswith("GGUF."):
            continue
        of_array = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], of_array)
    for key, value in changes.items():
        if isinstance(value, tuple):
            writer.add_key_value(key, value[1], value[0])
        elif value is not None and key != "general.architecture":
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    return writer


def _written(writer: gguf.GGUFWriter, out: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


class Tensor:
    """A row of the table of tensors, by the numbers that are in the file."""

    def __init__(
        self, name: str, dims: Sequence[int] = (32,), kind: int = 0, offset: int = 0
    ) -> None:
        head = string(name) + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        self.row = head + struct.pack("<IQ", kind, offset)


def string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def header(
    metadata: Mapping[str, bytes],
    tensors: Sequence[Tensor],
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Metadata are bytes that begin with the type of the value."""
    num_tensors, num_values = counts or (len(tensors), len(metadata))
    values = b"".join(string(key) + value for key, value in metadata.items())
    rows = b"".join(tensor.row for tensor in tensors)
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values) + values + rows


def text(value: str) -> bytes:
    return struct.pack("<I", 8) + string(value)


def number(value: int) -> bytes:
    return struct.pack("<II", 4, value)
