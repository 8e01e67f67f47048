"""Checkpoints as they are published: names, shapes and dtypes of all tensors, and no weights.

    configs -> name, shape and dtype of every tensor -> a safetensors file full of holes

`moe-infinity inspect` and `plan` read headers only, so they say of such a folder what they say of
the real one. It takes a few megabytes of disk. The configs say what is known of the models'
`config.json`, without what changes no size; nobody compared them with the files on the hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
FP8_BLOCK = 128  # rows and columns that share a scale
MXFP4_BLOCK = 32  # weights that share a scale


class Tensor(NamedTuple):
    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "torch_dtype": "bfloat16",
    "head_dim": 128, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
    "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "torch_dtype": "bfloat16",
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128,
    "vocab_size": 201088, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
            "lm_head",
        ],
    },
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "torch_dtype": "bfloat16", "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "moe_layer_freq": 1, "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}  # fmt: skip

# By the id on the hub, config.json.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-30B-A3B": QWEN3_MOE | {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "intermediate_size": 6144, "moe_intermediate_size": 768,
    },
    "Qwen/Qwen3-235B-A22B": QWEN3_MOE | {
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
        "intermediate_size": 12288, "moe_intermediate_size": 1536,
    },
    "openai/gpt-oss-20b": GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32},
    "openai/gpt-oss-120b": GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128},
    "deepseek-ai/DeepSeek-V2-Lite": DEEPSEEK | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2",
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_hidden_layers": 27, "first_k_dense_replace": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_experts_per_tok": 6, "num_attention_heads": 16,
        "num_key_value_heads": 16, "q_lora_rank": None, "vocab_size": 102400, "n_group": 1,
        "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "deepseek-ai/DeepSeek-V3": DEEPSEEK | {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "first_k_dense_replace": 3, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "num_attention_heads": 128,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "vocab_size": 129280, "n_group": 8,
        "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        },
    },
}  # fmt: skip


def tensors_of(config: dict[str, Any]) -> Iterator[Tensor]:
    """All tensors of a published checkpoint."""
    hidden = config["hidden_size"]
    table = (config["vocab_size"], hidden)
    yield Tensor("model.embed_tokens.weight", table)
    layer = {"qwen3_moe": qwen3_layer, "gpt_oss": gpt_oss_layer}.get(
        config["model_type"], deepseek_layer
    )
    for layer_idx in range(config["num_hidden_layers"]):
        yield from norms(f"model.layers.{layer_idx}", hidden)
        yield from layer(f"model.layers.{layer_idx}", config, layer_idx)
    for extra in range(config.get("num_nextn_predict_layers", 0)):
        yield from next_token_layer(config, config["num_hidden_layers"] + extra)
    yield Tensor("model.norm.weight", (hidden,))
    yield Tensor("lm_head.weight", table)


def norms(at: str, hidden: int) -> Iterator[Tensor]:
    yield Tensor(f"{at}.input_layernorm.weight", (hidden,))
    yield Tensor(f"{at}.post_attention_layernorm.weight", (hidden,))


def attention(at: str, config: dict[str, Any], *, has_bias: bool) -> Iterator[Tensor]:
    hidden = config["hidden_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    for name, width in {"q_proj": query, "k_proj": kv, "v_proj": kv}.items():
        yield Tensor(f"{at}.self_attn.{name}.weight", (width, hidden))
        if has_bias:
            yield Tensor(f"{at}.self_attn.{name}.bias", (width,))
    yield Tensor(f"{at}.self_attn.o_proj.weight", (hidden, query))
    if has_bias:
        yield Tensor(f"{at}.self_attn.o_proj.bias", (hidden,))


def linear(name: str, rows: int, columns: int, config: dict[str, Any]) -> Iterator[Tensor]:
    """A weight: in fp8 with its scales where the config says so."""
    if config.get("quantization_config", {}).get("quant_method") != "fp8":
        yield Tensor(f"{name}.weight", (rows, columns))
        return
    yield Tensor(f"{name}.weight", (rows, columns), "F8_E4M3")
    blocks = (ceil(rows / FP8_BLOCK), ceil(columns / FP8_BLOCK))
    yield Tensor(f"{name}.weight_scale_inv", blocks, "F32")


def mlp(at: str, inner: int, config: dict[str, Any]) -> Iterator[Tensor]:
    yield from linear(f"{at}.gate_proj", inner, config["hidden_size"], config)
    yield from linear(f"{at}.up_proj", inner, config["hidden_size"], config)
    yield from linear(f"{at}.down_proj", config["hidden_size"], inner, config)


def qwen3_layer(at: str, config: dict[str, Any], layer_idx: int) -> Iterator[Tensor]:
    yield from attention(at, config, has_bias=False)
    for name in ("q_norm", "k_norm"):
        yield Tensor(f"{at}.self_attn.{name}.weight", (config["head_dim"],))
    yield Tensor(f"{at}.mlp.gate.weight", (config["num_experts"], config["hidden_size"]))
    for expert_idx in range(config["num_experts"]):
        yield from mlp(f"{at}.mlp.experts.{expert_idx}", config["moe_intermediate_size"], config)


def gpt_oss_layer(at: str, config: dict[str, Any], layer_idx: int) -> Iterator[Tensor]:
    yield from attention(at, config, has_bias=True)
    experts = config["num_local_experts"]
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    yield Tensor(f"{at}.self_attn.sinks", (config["num_attention_heads"],))
    yield Tensor(f"{at}.mlp.router.weight", (experts, hidden))
    yield Tensor(f"{at}.mlp.router.bias", (experts,))
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        blocks = (experts, rows, columns // MXFP4_BLOCK)
        yield Tensor(f"{at}.mlp.experts.{name}_blocks", (*blocks, MXFP4_BLOCK // 2), "U8")
        yield Tensor(f"{at}.mlp.experts.{name}_scales", blocks, "U8")
        yield Tensor(f"{at}.mlp.experts.{name}_bias", (experts, rows))


def deepseek_layer(at: str, config: dict[str, Any], layer_idx: int) -> Iterator[Tensor]:
    yield from latent_attention(f"{at}.self_attn", config)
    if layer_idx < config["first_k_dense_replace"]:
        yield from mlp(f"{at}.mlp", config["intermediate_size"], config)
        return
    experts = config["n_routed_experts"]
    inner = config["moe_intermediate_size"]
    yield Tensor(f"{at}.mlp.gate.weight", (experts, config["hidden_size"]))
    if config["model_type"] == "deepseek_v3":
        yield Tensor(f"{at}.mlp.gate.e_score_correction_bias", (experts,), "F32")
    for expert_idx in range(experts):
        yield from mlp(f"{at}.mlp.experts.{expert_idx}", inner, config)
    yield from mlp(f"{at}.mlp.shared_experts", config["n_shared_experts"] * inner, config)


def latent_attention(at: str, config: dict[str, Any]) -> Iterator[Tensor]:
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    query = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    key_value = heads * (config["qk_nope_head_dim"] + config["v_head_dim"])
    rank = config["kv_lora_rank"]
    if config["q_lora_rank"] is None:
        yield from linear(f"{at}.q_proj", query, hidden, config)
    else:
        yield from linear(f"{at}.q_a_proj", config["q_lora_rank"], hidden, config)
        yield Tensor(f"{at}.q_a_layernorm.weight", (config["q_lora_rank"],))
        yield from linear(f"{at}.q_b_proj", query, config["q_lora_rank"], config)
    latent = rank + config["qk_rope_head_dim"]
    yield from linear(f"{at}.kv_a_proj_with_mqa", latent, hidden, config)
    yield Tensor(f"{at}.kv_a_layernorm.weight", (rank,))
    yield from linear(f"{at}.kv_b_proj", key_value, rank, config)
    yield from linear(f"{at}.o_proj", hidden, heads * config["v_head_dim"], config)


def next_token_layer(config: dict[str, Any], layer_idx: int) -> Iterator[Tensor]:
    """DeepSeek-V3's layer for predicting a second token, which transformers leaves out."""
    at = f"model.layers.{layer_idx}"
    hidden = config["hidden_size"]
    table = (config["vocab_size"], hidden)
    yield Tensor(f"{at}.embed_tokens.weight", table)
    yield Tensor(f"{at}.enorm.weight", (hidden,))
    yield Tensor(f"{at}.hnorm.weight", (hidden,))
    yield Tensor(f"{at}.eh_proj.weight", (hidden, 2 * hidden))
    yield from norms(at, hidden)
    yield from deepseek_layer(at, config, layer_idx)
    yield Tensor(f"{at}.shared_head.norm.weight", (hidden,))
    yield Tensor(f"{at}.shared_head.head.weight", table)


def write_hollow(model: str, folder: Path) -> None:
    """Write the checkpoint of a hub id into `folder`: config, header, and holes for the weights."""
    config = PUBLISHED[model]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    header: dict[str, Any] = {}
    end = 0
    for tensor in tensors_of(config):
        begin = end
        end += tensor.num_bytes
        entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
        header[tensor.name] = entry
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
