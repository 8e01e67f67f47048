"""Write a Qwen3-MoE checkpoint as GGUF, so that llama.cpp can be measured with the same weights.

    python tools/convert_to_gguf.py MODEL OUT.gguf          # needs the gguf package

bfloat16 stays bfloat16. One tensor at a time is in memory, at most all experts of a layer. The file
has no tokenizer: llama.cpp gets and returns token ids.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from safetensors import safe_open

BF16 = gguf.GGMLQuantizationType.BF16
F32 = gguf.GGMLQuantizationType.F32
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class Target(NamedTuple):
    """A tensor of the GGUF file, and the tensors of the checkpoint that it is made of."""

    name: str
    sources: list[str]  # one, or one per expert


def targets(config: dict[str, Any]) -> Iterator[Target]:
    for ours, theirs in NAMES.items():
        yield Target(f"{theirs}.weight", [f"{ours}.weight"])
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for ours, theirs in LAYER_NAMES.items():
            yield Target(f"blk.{layer}.{theirs}.weight", [f"{at}.{ours}.weight"])
        for part in ("gate", "up", "down"):
            experts = range(config["num_experts"])
            sources = [f"{at}.mlp.experts.{e}.{part}_proj.weight" for e in experts]
            yield Target(f"blk.{layer}.ffn_{part}_exps.weight", sources)


class Checkpoint:
    """The tensors of all shards of a checkpoint, by name."""

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        files = {name: safe_open(folder / name, "pt") for name in {*index["weight_map"].values()}}
        self._file_of = {key: files[name] for key, name in index["weight_map"].items()}

    def shape(self, target: Target) -> tuple[int, ...]:
        shape = tuple(self._file_of[target.sources[0]].get_slice(target.sources[0]).get_shape())
        return shape if len(target.sources) == 1 else (len(target.sources), *shape)

    def read(self, target: Target) -> torch.Tensor:
        found = [self._file_of[source].get_tensor(source) for source in target.sources]
        return found[0] if len(found) == 1 else torch.stack(found)


def is_float32(target: Target, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp wants a tensor in float32: norms and routers."""
    return len(shape) == 1 or "ffn_gate_inp" in target.name


def write_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a Qwen3-MoE checkpoint as GGUF")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    if config["model_type"] != "qwen3_moe":
        raise SystemExit(f"{args.model} is {config['model_type']}, only qwen3_moe is understood")
    checkpoint = Checkpoint(args.model)
    writer = gguf.GGUFWriter(str(args.out), "qwen3moe")
    write_metadata(writer, config)
    wanted = [(target, checkpoint.shape(target)) for target in targets(config)]
    for target, shape in wanted:
        dtype = F32 if is_float32(target, shape) else BF16
        num_bytes = int(np.prod(shape)) * (4 if dtype is F32 else 2)
        writer.add_tensor_info(target.name, shape, np.dtype(np.float32), num_bytes, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for target, shape in wanted:
        tensor = checkpoint.read(target)
        if is_float32(target, shape):
            writer.write_tensor_data(tensor.float().numpy())
        else:
            writer.write_tensor_data(tensor.contiguous().view(torch.uint8).numpy())
    writer.close()


if __name__ == "__main__":
    main()
