"""Write a checkpoint of a MoE model as GGUF, as llama.cpp's converter does.

    python tools/convert_to_gguf.py MODEL OUT.gguf --type q8_0          # needs the gguf package

Names are mapped by the gguf package. One tensor at a time is in memory, at most all experts of a
layer. Norms, routers and biases stay float32. K-quants, for which the package has no quantizer, are
filled with random blocks: for measurements and tests. `quantize_gguf.py` quantizes with llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors import safe_open

sys.path.append(str(Path(__file__).resolve().parents[1]))  # if this is run as a script

from tools.gguf_blocks import K_QUANTS, RandomBlocks
from tools.gguf_changes import CHANGED, NAMES, NAMES_OF, OF_VISION, changed
from tools.gguf_layers import as_written, more_tensors
from tools.gguf_metadata import WIDE_KEYS, more_metadata
from tools.gguf_types import MIXES, Shape, types_of
from tools.vocabulary_to_gguf import read_tokenizer

ARCHITECTURES = {
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "mixtral": "llama", "olmoe": "olmoe",
    "gpt_oss": "gpt-oss", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe", "granitemoe": "granitemoe", "granitemoeshared": "granitemoe",
    "phimoe": "phimoe", "ernie4_5_moe": "ernie4_5-moe", "llama4_text": "llama4",
    "minimax_m2": "minimax-m2", "qwen3_next": "qwen3next", "qwen3_5_moe_text": "qwen35moe",
    "gemma4_text": "gemma4", "lfm2_moe": "lfm2moe", "granitemoehybrid": "granitehybrid",
    "nemotron_h": "nemotron_h_moe", "dots1": "dots1", "hunyuan_v1_moe": "hunyuan-moe",
    "afmoe": "afmoe", "exaone_moe": "exaone-moe", "jamba": "jamba", "kimi_linear": "kimi-linear",
    "glm_moe_dsa": "glm-dsa", "glm4_moe_lite": "deepseek2", "solar_open": "glm4moe",
    "cohere2_moe": "cohere2moe", "deepseek_v32": "deepseek32", "hy_v3": "hy_v3",
    "laguna": "laguna", "mellum": "mellum", "mimo_v2_flash": "mimo2",
    "qwen4_exp_text": "qwen4exp", "deepseek_v4": "deepseek4", "mistral4": "mistral4",
    "minimax_m3_vl_text": "minimax-m3", "glm5_next": "glm5-next", "qwen3_vl_moe": "qwen3vlmoe",
    "step3p7": "step35",
}  # fmt: skip
# Of what the gguf package does not know: one that it knows, with the same names.
NAMED_AS = {
    "cohere2moe": "dots1", "deepseek32": "glm-dsa", "hy_v3": "dots1", "laguna": "step35",
    "mellum": "qwen3moe", "qwen4exp": "qwen35moe", "deepseek4": "deepseek2",
    "minimax-m3": "glm4moe", "glm5-next": "kimi-linear",
}  # fmt: skip
EXPERT = re.compile(
    r"(?:model|backbone|model\.language_model)\.layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight"
)
LEAVES = dict(gate_proj="gate", up_proj="up", down_proj="down", w1="gate", w3="up", w2="down")
REORDERED = ("llama", "granitemoe")  # rows of q and k
ROWS_FIRST = ("minimax-m3", "mistral4", "qwen3vlmoe")  # of experts, as transformers saves them
# Of whole numbers, by the end of their names: they are metadata of the file.
CONSTANTS = ("layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")
PLAIN = {Type.F32: np.float32, Type.F16: np.float16, Type.I32: np.int32}
RANDOM_SIZE = 0.02  # of weights that no quantizer makes


class Target(NamedTuple):
    """A tensor of the GGUF file, and how it is made of tensors of the checkpoint."""

    name: str
    sources: list[str]
    make: Callable[[list[torch.Tensor]], torch.Tensor]


def _constant(values: list[float], tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor(values)


def _rows_of_half(place: int, tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0].chunk(2, -2)[place]


def one(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


class Converter:
    """Which tensors there are to be, by what llama.cpp's converter does to each."""

    def __init__(self, config: dict[str, Any], names: list[str]) -> None:
        self._config = config
        self._names = names
        self.architecture = ARCHITECTURES[config["model_type"]]
        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        num_layers = as_written(config)["num_hidden_layers"]
        named_as = NAMED_AS.get(self.architecture, self.architecture)
        self._map = gguf.get_tensor_name_map(numbers[named_as], num_layers)

    def targets(self) -> Iterator[Target]:
        stacks: dict[str, list[tuple[int, str]]] = {}
        shards = [name for name in self._names if ".ngram_embedding.shard_" in name]
        if shards:
            in_order = sorted(shards, key=lambda name: int(name.split("shard_")[1].split(".")[0]))
            yield Target("per_layer_token_embd.weight", in_order, torch.cat)
        for name in self._names:
            if name in shards or name.endswith(CONSTANTS) or OF_VISION.search(name):
                continue
            if match := EXPERT.fullmatch(name):
                stack = f"blk.{match[1]}.ffn_{LEAVES[match[3]]}_exps.weight"
                stacks.setdefault(stack, []).append((int(match[2]), name))
            else:
                yield from self._of_one(name)
        for stack, sources in stacks.items():
            yield Target(stack, [source for _, source in sorted(sources)], torch.stack)
        for name, values in more_tensors(self._config).items():
            yield Target(name, [], partial(_constant, values))

    def _of_one(self, name: str) -> Iterator[Target]:
        number = re.search(r"\.(\d+)\.", name)
        block = f"blk.{number[1]}" if number else ""
        names = NAMES_OF.get(self.architecture, NAMES)
        leaf = next((leaf for end, leaf in names.items() if name.endswith(end)), None)
        if self.architecture in CHANGED and leaf is not None:
            yield Target(f"{block}.{leaf}".lstrip("."), [name], self._changed(name))
        elif self.architecture in ROWS_FIRST and "gate_up_proj" in name:
            module = name.partition(".gate_up_proj")[0].rpartition(".")[2]
            end = {"shared_experts": "_shexp", "experts": "_exps", "mlp": ""}[module]
            for place, leaf in enumerate(("gate", "up")):
                half = partial(_rows_of_half, place)
                yield Target(f"{block}.ffn_{leaf}{end}.weight", [name], half)
        elif name.endswith("index_qk_proj.weight"):
            rows = self._config["indexer_head_dim"] * self._config["indexer_n_heads"]
            yield Target(f"{block}.indexer.q_proj.weight", [name], lambda t: t[0][:rows])
            yield Target(f"{block}.indexer.k_proj.weight", [name], lambda t: t[0][rows:])
        elif name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
            suffix = "bias" if name.endswith("_bias") else "weight"
            for place, leaf in enumerate(("gate", "up")):
                yield Target(f"{block}.ffn_{leaf}_exps.{suffix}", [name], self._half(place, suffix))
        elif name.endswith("experts.down_proj"):
            move = one if self.architecture in ROWS_FIRST else lambda t: t[0].transpose(1, 2)
            yield Target(f"{block}.ffn_down_exps.weight", [name], move)
        elif name.endswith("experts.down_proj_bias"):
            yield Target(f"{block}.ffn_down_exps.bias", [name], one)
        elif name.endswith("_moe.input_linear.weight"):
            yield Target(f"{block}.ffn_gate_exps.weight", [name], lambda t: t[0].chunk(2, 1)[0])
            yield Target(f"{block}.ffn_up_exps.weight", [name], lambda t: t[0].chunk(2, 1)[1])
        elif name.endswith("shared_mlp.input_linear.weight"):
            yield Target(f"{block}.ffn_gate_shexp.weight", [name], lambda t: t[0].chunk(2)[0])
            yield Target(f"{block}.ffn_up_shexp.weight", [name], lambda t: t[0].chunk(2)[1])
        elif name.endswith("kv_b_proj.weight"):
            yield Target(f"{block}.attn_k_b.weight", [name], lambda t: self._keys(t[0]))
            yield Target(f"{block}.attn_v_b.weight", [name], lambda t: self._values(t[0]))
        elif name.endswith("in_proj_qkvz.weight"):
            for leaf, places in (("qkv", [0, 1, 2]), ("gate", [3])):
                make = partial(self._of_heads, places)
                yield Target(f"{block}.attn_{leaf}.weight", [name], make)
        elif self.architecture in CHANGED:
            yield Target(self._mapped(name), [name], self._changed(name))
        else:
            yield Target(self._mapped(name), [name], self._plain(name))

    def _of_heads(self, places: list[int], tensors: list[torch.Tensor]) -> torch.Tensor:
        """Of a linear attention's queries, keys, values and gates, some of all heads."""
        config = self._config
        weight = tensors[0]
        heads = config["linear_num_key_heads"]
        key = config["linear_key_head_dim"]
        value = config["linear_num_value_heads"] // heads * config["linear_value_head_dim"]
        by_head = weight.reshape(heads, -1, weight.shape[1]).split([key, key, value, value], 1)
        return torch.cat([by_head[place].flatten(0, 1) for place in places])

    def _changed(self, name: str) -> Callable[[list[torch.Tensor]], torch.Tensor]:
        return lambda tensors: changed(self.architecture, name, tensors[0], self._config)

    def _mapped(self, name: str) -> str:
        name = name.replace(".language_model.", ".")
        name = name.removesuffix("_bias") + ".bias" if name.endswith("correction_bias") else name
        # transformers saves dense layers of Kimi Linear under the name of those with experts.
        name = re.sub(r"block_sparse_moe\.(\w+_proj)\.", r"mlp.\1.", name)
        name = f"{name}.weight" if name.endswith(("sinks", "sink_bias")) else name
        found = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise SystemExit(f"{self.architecture} has no tensor for {name}")
        return found

    def _plain(self, name: str) -> Callable[[list[torch.Tensor]], torch.Tensor]:
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        leaf = name.split(".")[-2] if "." in name else name
        if self.architecture not in REORDERED or leaf not in heads:
            return lambda tensors: tensors[0].squeeze()
        num_heads = self._config[heads[leaf]]

        def reordered(tensors: list[torch.Tensor]) -> torch.Tensor:
            weight = tensors[0]
            halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
            return halves.swapaxes(1, 2).reshape(weight.shape)

        return reordered

    def _half(self, place: int, suffix: str) -> Callable[[list[torch.Tensor]], torch.Tensor]:
        """Gate or up of an experts' parameter that is [E, in, out]."""

        def half(tensors: list[torch.Tensor]) -> torch.Tensor:
            whole = tensors[0].transpose(1, 2) if suffix == "weight" else tensors[0]
            if self.architecture == "gpt-oss":
                return whole[:, place::2]
            return whole.chunk(2, 1)[place]

        return half

    def _keys(self, weight: torch.Tensor) -> torch.Tensor:
        return self._heads(weight)[:, : self._config["qk_nope_head_dim"]].transpose(1, 2)

    def _values(self, weight: torch.Tensor) -> torch.Tensor:
        return self._heads(weight)[:, self._config["qk_nope_head_dim"] :]

    def _heads(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.reshape(self._config["num_attention_heads"], -1, weight.shape[-1])


class Checkpoint:
    """The tensors of all shards of a checkpoint, by name."""

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("*.safetensors"))
        files: list[Any] = [safe_open(path, "pt") for path in paths]
        self._file_of: dict[str, Any] = {key: file for file in files for key in file.keys()}  # noqa: SIM118

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def read(self, target: Target) -> torch.Tensor:
        found = [self._file_of[source].get_tensor(source) for source in target.sources]
        return target.make(found).contiguous()

    def constants(self) -> dict[str, list[int]]:
        """Those of CONSTANTS that the checkpoint has, without the layer."""
        names = [name for name in self._file_of if name.endswith(CONSTANTS)]
        tensors = {name.split(".")[-1]: self._file_of[name].get_tensor(name) for name in names}
        return {name: tensor.tolist() for name, tensor in tensors.items()}

    def shape(self, target: Target) -> tuple[int, ...]:
        """Without reading: of tensors without values."""
        slices = [self._file_of[source].get_slice(source) for source in target.sources]
        return tuple(target.make([torch.empty(s.get_shape(), device="meta") for s in slices]).shape)


def quantized(tensor: torch.Tensor, stored: Type) -> NDArray[Any]:
    if stored == Type.I32:
        return tensor.int().numpy()
    if stored not in K_QUANTS:
        return gguf.quants.quantize(tensor.float().numpy(), stored)
    num_blocks = tensor.numel() // gguf.GGML_QUANT_SIZES[stored][0]
    blocks = RandomBlocks(stored, num_blocks, seed=tensor.numel()).of_size(RANDOM_SIZE)
    return blocks.reshape(*tensor.shape[:-1], -1)


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata that belong to the architecture, by the end of their keys."""
    more = more_metadata(config)
    config = as_written(config)
    rope = config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    num_rotated = int(head_dim * rope.get("partial_rotary_factor", 1))
    names_of_k = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
    names_of_count = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    found = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": config.get("value_head_dim", head_dim),
        "rope.dimension_count": config.get("qk_rope_head_dim", num_rotated),
        "rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 1e4),
        "vocab_size": config["vocab_size"],
        "expert_count": next(config[name] for name in names_of_count if name in config),
        "expert_used_count": next(config[name] for name in names_of_k if name in config),
    }
    sizes = {
        "intermediate_size": "feed_forward_length",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    scales = {
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    found |= {key: config[name] for name, key in sizes.items() if config.get(name)}
    found |= {key: float(config[name]) for name, key in scales.items() if config.get(name)}
    if "sliding_attention" in config.get("layer_types", ()):
        found["attention.sliding_window"] = config["sliding_window"]
    if rope.get("rope_type") == "yarn":
        found["rope.scaling.type"] = gguf.RopeScalingType.YARN.value
        found["rope.scaling.factor"] = float(rope["factor"])
        original = rope["original_max_position_embeddings"]
        found["rope.scaling.original_context_length"] = original
    return {key: value for key, value in (found | more).items() if value is not None}


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """A byte-level BPE of tokenizer.json, filled up to the size of the model's vocabulary; none if
    there is no such file.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        writer.add_tokenizer_model("no_vocab")
        return
    pre = "smollm" if '"individual_digits": true' in file.read_text("utf-8") else "qwen2"
    metadata = read_tokenizer(folder, pre=pre, vocab_size=config["vocab_size"])
    for name in ("bos", "eos"):
        if isinstance(token_id := config.get(f"{name}_token_id"), int):
            metadata[f"tokenizer.ggml.{name}_token_id"] = token_id
    add_all(writer, metadata)


def add_all(writer: gguf.GGUFWriter, metadata: dict[str, Any]) -> None:
    for key, value in metadata.items():
        of_array = gguf.GGUFValueType.UINT64 if key.endswith(WIDE_KEYS) else None
        writer.add_key_value(key, value, value_type(value), of_array)


def value_type(value: Any) -> gguf.GGUFValueType:
    """The type that the converter gives a value: whole numbers are unsigned."""
    is_whole = type(value) is int
    return gguf.GGUFValueType.UINT32 if is_whole else gguf.GGUFValueType.get_type(value)


def begin_file(
    out: Path,
    config: dict[str, Any],
    tokenizer: Path,
    stored: Mapping[str, tuple[Shape, Type]],
    *,
    split: int = 0,
) -> gguf.GGUFWriter:
    """Write all that comes before the tensors, of which `stored` gives shapes and types."""
    writer = gguf.GGUFWriter(out, ARCHITECTURES[config["model_type"]], split_max_tensors=split)
    writer.add_type("model")
    metadata = metadata_of(config)
    add_all(writer, {f"{writer.arch}.{key}": value for key, value in metadata.items()})
    write_tokenizer(writer, tokenizer, config)
    for name, (shape, kind) in stored.items():
        weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        row = shape[-1] // weights * num_bytes
        is_plain = kind in PLAIN
        info = shape if is_plain else (*shape[:-1], row)
        dtype = np.dtype(PLAIN.get(kind, np.uint8))
        writer.add_tensor_info(name, info, dtype, prod(shape[:-1]) * row, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def convert(folder: Path, out: Path, wanted: str, *, split: int = 0) -> None:
    """`split`: the most tensors of one part; 0: one file."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", {}) | config  # of a model that sees
    if config["model_type"] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise SystemExit(f"{folder} is {config['model_type']}, expected one of {known}")
    checkpoint = Checkpoint(folder)
    targets = list(Converter(config, checkpoint.names).targets())
    shapes = {target.name: checkpoint.shape(target) for target in targets}
    kinds = types_of(shapes, wanted)
    stored = {name: (shape, kinds[name]) for name, shape in shapes.items()}
    writer = begin_file(out, config | checkpoint.constants(), folder, stored, split=split)
    for target in targets:
        writer.write_tensor_data(quantized(checkpoint.read(target), kinds[target.name]))
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a MoE checkpoint as GGUF")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=MIXES, default="bf16")
    parser.add_argument("--split", type=int, default=0, help="the most tensors of one part")
    args = parser.parse_args()
    convert(args.model, args.out, args.type, split=args.split)


if __name__ == "__main__":
    main()
