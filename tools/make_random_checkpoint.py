"""Write a random Qwen3-MoE checkpoint of any size with little memory, laid out as on the hub.

    sizes -> plan (name, shape, scale of every tensor) -> shards, index, configs -> OUT

    python tools/make_random_checkpoint.py OUT --gib 6 --tokenizer models/demo

Each tensor is a stretch of one pool of normal numbers with its own start. So no two experts are
equal, and the disk limits the speed. The router separates experts clearly, and equal tokens are
routed alike, but not tokens of one topic: that is the hard case for a cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from tokenizers import Tokenizer

GIB = 1 << 30
ITEM_BYTES = 2  # bfloat16
POOL_LENGTH = (1 << 22) - 3  # prime: tensors that wrap around do not repeat row by row
POOL_STEP = 1_299_709  # prime: the first POOL_LENGTH tensors all start at different places
ROUTER_SCALE = 3.0  # standard deviation of the router logits
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class TensorPlan(NamedTuple):
    name: str
    shape: tuple[int, ...]
    scale: float  # standard deviation, 0 for a tensor of ones


def plan(args: argparse.Namespace, num_layers: int) -> Iterator[TensorPlan]:
    """All tensors of the checkpoint.

    The scale is 1 / sqrt(fan in); of tensors that add to the residual, 1 / sqrt(layers) of that. So
    hidden states stay near 1 and keep their token's embedding at any depth.
    """
    hidden = args.hidden
    head = args.head_dim
    inner = args.moe_intermediate
    query = args.heads * head
    kv = args.kv_heads * head
    into = hidden**-0.5
    added = num_layers**-0.5
    yield TensorPlan("model.embed_tokens.weight", (args.vocab, hidden), 1.0)
    for at in (f"model.layers.{layer_idx}" for layer_idx in range(num_layers)):
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        for name, width in (norms | {"self_attn.q_norm": head, "self_attn.k_norm": head}).items():
            yield TensorPlan(f"{at}.{name}.weight", (width,), 0)
        for name, width in {"q_proj": query, "k_proj": kv, "v_proj": kv}.items():
            yield TensorPlan(f"{at}.self_attn.{name}.weight", (width, hidden), into)
        yield TensorPlan(f"{at}.self_attn.o_proj.weight", (hidden, query), query**-0.5 * added)
        yield TensorPlan(f"{at}.mlp.gate.weight", (args.experts, hidden), into * ROUTER_SCALE)
        for expert in (f"{at}.mlp.experts.{expert_idx}" for expert_idx in range(args.experts)):
            yield TensorPlan(f"{expert}.gate_proj.weight", (inner, hidden), into)
            yield TensorPlan(f"{expert}.up_proj.weight", (inner, hidden), into)
            yield TensorPlan(f"{expert}.down_proj.weight", (hidden, inner), inner**-0.5 * added)
    yield TensorPlan("model.norm.weight", (hidden,), 0)
    yield TensorPlan("lm_head.weight", (args.vocab, hidden), into)


def size_of(tensors: Iterable[TensorPlan]) -> int:
    return sum(prod(tensor.shape) for tensor in tensors) * ITEM_BYTES


def layers_for(args: argparse.Namespace) -> int:
    one_bytes = size_of(plan(args, 1))
    two_bytes = size_of(plan(args, 2))
    layers: int = 1 + round((args.gib * GIB - one_bytes) / (two_bytes - one_bytes))
    if layers < 1:
        raise SystemExit(f"one layer makes {one_bytes / GIB:.2f} GiB: raise --gib, lower --experts")
    return layers


def into_shards(tensors: list[TensorPlan], shard_bytes: float) -> list[list[TensorPlan]]:
    shards: list[list[TensorPlan]] = [[]]
    for tensor in tensors:
        if shards[-1] and size_of(shards[-1]) + size_of([tensor]) > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    return shards


class Pool:
    """Normal numbers in bfloat16, kept once per scale: a few scales of 8 MiB each."""

    def __init__(self, seed: int) -> None:
        self._normal = torch.randn(POOL_LENGTH, generator=torch.Generator().manual_seed(seed))
        self._scaled: dict[float, np.ndarray] = {}
        self._num_written = 0

    def write(self, file: BinaryIO, tensor: TensorPlan) -> None:
        if tensor.scale not in self._scaled:
            values = self._normal * tensor.scale if tensor.scale else torch.ones(POOL_LENGTH)
            self._scaled[tensor.scale] = values.bfloat16().view(torch.int16).numpy()
        start = self._num_written * POOL_STEP % POOL_LENGTH
        left = prod(tensor.shape)
        self._num_written += 1
        while left:
            stretch = self._scaled[tensor.scale][start : start + left]
            file.write(stretch.data)
            start = 0
            left = left - len(stretch)


def safetensors_header(shard: list[TensorPlan]) -> bytes:
    """The header: its length, then JSON padded so that tensors start at a multiple of 8."""
    header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    offsets = [0, 0]
    for tensor in shard:
        offsets = [offsets[1], offsets[1] + size_of([tensor])]
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_weights(folder: Path, shards: list[list[TensorPlan]], seed: int) -> None:
    pool = Pool(seed)
    weight_map = {}
    total_bytes = sum(size_of(shard) for shard in shards)
    with Progress(BarColumn(), DownloadColumn(True), TransferSpeedColumn()) as progress:
        task = progress.add_task("", total=total_bytes)
        for number, shard in enumerate(shards, start=1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            with (folder / name).open("wb") as file:
                file.write(safetensors_header(shard))
                for tensor in shard:
                    pool.write(file, tensor)
                    weight_map[tensor.name] = name
                    progress.advance(task, size_of([tensor]))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_configs(folder: Path, args: argparse.Namespace, num_layers: int) -> None:
    """Write the config files with the field names of Qwen3-MoE checkpoints on the hub."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16", "vocab_size": args.vocab, "tie_word_embeddings": False,
        "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden,
        "num_hidden_layers": num_layers, "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads, "head_dim": args.head_dim,
        "num_experts": args.experts, "num_experts_per_tok": args.top_k, "norm_topk_prob": True,
        "moe_intermediate_size": args.moe_intermediate, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
        "rope_theta": 1000000.0, "eos_token_id": 0, "pad_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text('{"eos_token_id": 0, "pad_token_id": 1}')


def check(args: argparse.Namespace, needed_bytes: int) -> None:
    if args.out.exists() and not (args.out.is_dir() and not any(args.out.iterdir())):
        raise SystemExit(f"{args.out} is there already and not an empty folder")
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
        if (tokens := tokenizer.get_vocab_size()) > args.vocab:
            raise SystemExit(f"--tokenizer has {tokens} tokens, --vocab only {args.vocab}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(args.out.parent).free
    if needed_bytes * 1.02 > free_bytes:  # a little is left for headers and the file system
        sizes = f"{needed_bytes / GIB:.2f} GiB to write, {free_bytes / GIB:.2f} GiB free"
        raise SystemExit(f"no room in {args.out.parent}: {sizes}")


def make(args: argparse.Namespace) -> None:
    """Write the checkpoint beside OUT and rename it, so that OUT is complete or missing."""
    num_layers = args.layers or layers_for(args)
    tensors = list(plan(args, num_layers))
    check(args, size_of(tensors))
    partial = args.out.with_name(args.out.name + ".partial")
    partial.mkdir()
    try:
        write_weights(partial, into_shards(tensors, args.shard_gib * GIB), args.seed)
        write_configs(partial, args, num_layers)
        for name in TOKENIZER_FILES if args.tokenizer else ():
            shutil.copyfile(args.tokenizer / name, partial / name)
        partial.rename(args.out)
    except BaseException:  # an interrupt too must not leave gigabytes behind
        shutil.rmtree(partial)
        raise
    print(f"{args.out}: {size_of(tensors) / GIB:.2f} GiB, {num_layers} layers")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random Qwen3-MoE checkpoint")
    parser.add_argument("out", type=Path, help="folder to make")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--gib", type=float, help="all weights together: as many layers as it takes")
    size.add_argument("--layers", type=int)
    sizes = {"experts": 64, "top-k": 8, "hidden": 1024, "moe-intermediate": 768, "heads": 16}
    sizes |= {"kv-heads": 4, "head-dim": 64, "vocab": 6144, "seed": 0}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{default} if not given")
    parser.add_argument("--shard-gib", type=float, default=1.0)
    parser.add_argument("--tokenizer", type=Path, help="copy the tokenizer of this folder")
    make(parser.parse_args())


if __name__ == "__main__":
    main()
