"""Write a GGUF file of a real model's shape with random weights, straight to the disk.

    config -> names and shapes of the checkpoint -> those of the file -> random blocks -> OUT

    python tools/make_random_gguf.py qwen3-30b-a3b runs/qwen3-30b-a3b.gguf          # 18.6 GB
    python tools/make_random_gguf.py qwen3-30b-a3b runs/cut.gguf --layers 2 --vocab 6144 \\
        --safetensors runs/cut                            # and the same weights for transformers

Names, order and metadata are those of convert_to_gguf.py, types those of llama.cpp's quantizer.
Each tensor is a stretch of a pool of blocks with its own start, so the disk limits the speed.
random_weights.py says what the numbers are like. The vocabulary is that of --tokenizer, filled up.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import gguf
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

sys.path.append(str(Path(__file__).resolve().parents[1]))  # if this is run as a script

from tools.convert_to_gguf import Converter, Target, begin_file
from tools.gguf_blocks import PLAIN, Blocks, RandomBlocks
from tools.gguf_types import MIXES, Shape, types_of
from tools.model_shapes import SHAPES
from tools.random_weights import embedding_blocks, small_tensor, weight_size

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
NAMES_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
POOL_BYTES = 16 << 20
POOL_STEP = 1_299_709  # prime: the first tensors all start at different places
FLUSHED_BYTES = 1 << 30  # what may wait for the disk: the page cache is for other programs
ROWS = 4096  # of the embedding that are put together at once


class Written(NamedTuple):
    """A tensor of the file, and what it is made of."""

    target: Target
    shape: Shape
    kind: Type

    @property
    def num_bytes(self) -> int:
        weights, num_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return prod(self.shape) // weights * num_bytes


class Model:
    """Names and shapes of a checkpoint, without values."""

    def __init__(self, args: argparse.Namespace) -> None:
        settings = dict(SHAPES[args.shape].config)
        if args.layers:
            settings["num_hidden_layers"] = args.layers
        if args.vocab:
            settings["vocab_size"] = args.vocab
        if args.experts:
            settings |= {name: args.experts for name in NAMES_OF_EXPERTS if name in settings}
        config = transformers.AutoConfig.for_model(**settings)
        with torch.device("meta"):
            model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
        self.sources: dict[str, torch.Tensor] = revert_weight_conversion(model, model.state_dict())
        self.config: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
        if config.tie_word_embeddings:
            del self.sources["lm_head.weight"]
        self.config["architectures"] = [type(model).__name__]
        for table in (each for each in model.modules() if hasattr(each, "head_offsets")):
            self.config |= {
                "layer_multipliers": [2 * place + 1 for place in range(table.ngram_size)],
                "ngram_heads_offsets": table.head_offsets,
                "ngram_heads_vocab_sizes": table.head_vocab_sizes,
            }
        converter = Converter(self.config, list(self.sources))
        targets = {target.name: target for target in converter.targets()}
        shapes = {name: self.shape_of(target) for name, target in targets.items()}
        kinds = types_of(shapes, args.type or SHAPES[args.shape].mix)
        self.tensors = [Written(targets[name], shapes[name], kinds[name]) for name in targets]

    def shape_of(self, target: Target) -> Shape:
        return tuple(target.make([self.sources[source] for source in target.sources]).shape)

    def small(self, source: str) -> torch.Tensor:
        """A tensor of the checkpoint that stays float32."""
        return small_tensor(source, self.sources[source].shape, self.config)


class Pools:
    """Random blocks, of each type and size once."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._of_kind: dict[Type, RandomBlocks] = {}
        self._of_size: dict[tuple[Type, float], Blocks] = {}
        self._num_written = 0

    def get(self, kind: Type, size: float) -> Blocks:
        if kind not in self._of_kind:
            num_blocks = POOL_BYTES // gguf.GGML_QUANT_SIZES[kind][1] | 1
            self._of_kind[kind] = RandomBlocks(kind, num_blocks, self._seed)
        if (kind, size) not in self._of_size:
            self._of_size[kind, size] = self._of_kind[kind].of_size(size)
        return self._of_size[kind, size]

    def write(self, file: BinaryIO, tensor: Written, size: float) -> None:
        pool = self.get(tensor.kind, size).reshape(-1)
        block_bytes = gguf.GGML_QUANT_SIZES[tensor.kind][1]
        start = self._num_written * POOL_STEP * block_bytes % len(pool)
        self._num_written += 1
        left = tensor.num_bytes
        while left:
            stretch = pool[start : start + left]
            file.write(stretch.data)
            start = 0
            left -= len(stretch)

    def write_embedding(self, file: BinaryIO, tensor: Written, size: float) -> None:
        pool = self.get(tensor.kind, size)
        num_rows, num_columns = tensor.shape
        num_blocks = num_columns // gguf.GGML_QUANT_SIZES[tensor.kind][0]
        for first in range(0, num_rows, ROWS):
            last = min(first + ROWS, num_rows)
            file.write(pool[embedding_blocks(first, last, num_blocks, len(pool))].data)


def write_weights(file: BinaryIO, model: Model, seed: int) -> dict[str, torch.Tensor]:
    """Write all tensors and return the sources of those in float32."""
    pools = Pools(seed)
    torch.manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    flushed = 0
    for tensor in model.tensors:
        size = weight_size(tensor.target.name, tensor.shape[-1], model.config)
        if tensor.kind == Type.F32:
            sources = tensor.target.sources
            found |= {name: model.small(name) for name in sources if name not in found}
            weight = tensor.target.make([found[name] for name in sources]).float().contiguous()
            file.write(weight.numpy().astype(PLAIN[Type.F32]).data)
        elif tensor.kind == Type.I32:  # experts of a token
            some = torch.rand(tensor.shape[0], model.config["n_routed_experts"])
            file.write(some.topk(tensor.shape[1]).indices.int().numpy().data)
        elif tensor.target.name == "token_embd.weight":
            pools.write_embedding(file, tensor, size)
        else:
            pools.write(file, tensor, size)
        file.write(bytes(-tensor.num_bytes % gguf.GGUF_DEFAULT_ALIGNMENT))
        if file.tell() - flushed > FLUSHED_BYTES:
            flush(file)
            flushed = file.tell()
    flush(file)
    return found


def flush(file: BinaryIO) -> None:
    file.flush()
    os.fdatasync(file.fileno())
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_hollow(shape: str, out: Path) -> None:
    """Write a file with holes for the weights, for who reads only the header."""
    model = Model(argparse.Namespace(shape=shape, layers=0, vocab=0, experts=0, type=None))
    stored = {tensor.target.name: (tensor.shape, tensor.kind) for tensor in model.tensors}
    writer = begin_file(out, model.config, DEMO, stored)
    alignment = gguf.GGUF_DEFAULT_ALIGNMENT
    file = (writer.fout or [])[0]
    sizes = [file.tell(), *(tensor.num_bytes for tensor in model.tensors)]
    file.truncate(sum(-(-size // alignment) * alignment for size in sizes))
    writer.close()
    (out.parent / "config.json").write_text(json.dumps(model.config))


def write_file(out: Path, model: Model, args: argparse.Namespace) -> dict[str, torch.Tensor]:
    stored = {tensor.target.name: (tensor.shape, tensor.kind) for tensor in model.tensors}
    writer = begin_file(out, model.config, args.tokenizer, stored)
    try:
        file = (writer.fout or [])[0]
        file.write(bytes(-file.tell() % gguf.GGUF_DEFAULT_ALIGNMENT))
        return write_weights(file, model, args.seed)
    finally:
        writer.close()


def write_safetensors(
    folder: Path, file: Path, model: Model, small: dict[str, torch.Tensor], tokenizer: Path
) -> None:
    """Write the checkpoint that the file could have been made of, in float32. What the converter
    moves is moved back by converting the numbers of the places.
    """
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    found = {name: torch.empty(model.sources[name].shape) for name in model.sources} | small
    for tensor in model.tensors:
        if tensor.kind == Type.F32:
            continue
        data = stored[tensor.target.name]
        weight = torch.from_numpy(gguf.quants.dequantize(data.data, data.tensor_type)).flatten()
        shapes = [found[source].shape for source in tensor.target.sources]
        counts = [prod(shape) for shape in shapes]
        places = torch.arange(sum(counts)).split(counts)
        order = tensor.target.make([p.reshape(s) for p, s in zip(places, shapes, strict=True)])
        whole = torch.cat([found[source].flatten() for source in tensor.target.sources])
        whole[order.flatten()] = weight
        parts = zip(tensor.target.sources, whole.split(counts), shapes, strict=True)
        found |= {source: part.reshape(shape) for source, part, shape in parts}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(found, folder / "model.safetensors", {"format": "pt"})
    config = model.config | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(tokenizer / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--type", choices=MIXES, help="default: that of most people's file")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--experts", type=int, help="fewer than a layer has")
    parser.add_argument("--vocab", type=int, help="fewer tokens than the model has")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, default=DEMO)
    parser.add_argument("--safetensors", type=Path, help="folder for the same weights in float32")
    args = parser.parse_args()
    model = Model(args)
    total = sum(tensor.num_bytes for tensor in model.tensors)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if total > shutil.disk_usage(args.out.parent).free:
        raise SystemExit(f"{args.out.parent} has no room for {total / 1e9:.1f} GB")
    partial = args.out.with_name(args.out.name + ".partial")
    began = time.perf_counter()
    try:
        small = write_file(partial, model, args)
        partial.rename(args.out)
    finally:  # an interrupt too must not leave gigabytes behind
        partial.unlink(missing_ok=True)
    print(f"{args.out}: {total / 1e9:.2f} GB in {time.perf_counter() - began:.0f} s")
    if args.safetensors:
        write_safetensors(args.safetensors, args.out, model, small, args.tokenizer)


if __name__ == "__main__":
    main()
