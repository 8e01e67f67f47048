"""Checkpoints of the shapes of published models: real configs and headers, weights are holes."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from tests import safetensors_file

COMMON = {"tie_word_embeddings": False, "dtype": "bfloat16"}
QWEN = COMMON | {
    "vocab_size": 151936,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
}
GPT_OSS = COMMON | {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64,
    "num_attention_heads": 64, "num_key_value_heads": 8, "num_experts_per_tok": 4,
    "sliding_window": 128,
}  # fmt: skip
DEEPSEEK = COMMON | {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip


class Published(NamedTuple):
    """As its card has it: billions of parameters, and of those that a token uses."""

    model_type: str
    settings: dict[str, Any]
    params: float
    activated: float


MODELS = {
    "Qwen3-30B-A3B": Published("qwen3_moe", QWEN | {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
    }, 30.5, 3.3),
    "Qwen3-235B-A22B": Published("qwen3_moe", QWEN | {
        "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts_per_tok": 8,
    }, 235, 22),
    "gpt-oss-20b": Published("gpt_oss", GPT_OSS | {
        "num_hidden_layers": 24, "num_local_experts": 32,
    }, 20.9, 3.6),
    "gpt-oss-120b": Published("gpt_oss", GPT_OSS | {
        "num_hidden_layers": 36, "num_local_experts": 128,
    }, 116.8, 5.1),
    "DeepSeek-V2-Lite": Published("deepseek_v2", DEEPSEEK | {
        "vocab_size": 102400, "hidden_size": 2048, "num_hidden_layers": 27, "q_lora_rank": None,
        "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    }, 15.7, 2.4),
    "DeepSeek-V3": Published("deepseek_v3", DEEPSEEK | {
        "vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61, "q_lora_rank": 1536,
        "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    }, 671, 37),
}  # fmt: skip


def hollow(name: str, folder: Path) -> Path:
    """gpt-oss with experts in MXFP4, as it was published; the others in bfloat16."""
    published = MODELS[name]
    config = transformers.AutoConfig.for_model(published.model_type, **published.settings)
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures = [model_class.__name__]
    if published.model_type == "gpt_oss":
        config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(folder)
    with torch.device("meta"):
        plain = type(config)(**published.settings)
        state = model_class(plain).state_dict()
    header: dict[str, Any] = {}
    end = 0
    for key, tensor in state.items():
        for stored, dtype, shape in _stored(key, list(tensor.shape), published.model_type):
            num_bytes = prod(shape) * (1 if dtype == "U8" else 2)
            header[stored] = safetensors_file.entry(dtype, shape, end, end + num_bytes)
            end += num_bytes
    file = safetensors_file.write(folder / "model.safetensors", header)
    os.truncate(file, file.stat().st_size + end)
    return folder


def _stored(key: str, shape: list[int], model_type: str) -> list[tuple[str, str, list[int]]]:
    if model_type == "gpt_oss" and key.endswith(("gate_up_proj", "down_proj")):
        experts, columns, rows = shape
        groups = columns // 32
        return [
            (f"{key}_blocks", "U8", [experts, rows, groups, 16]),
            (f"{key}_scales", "U8", [experts, rows, groups]),
        ]
    return [(key, "BF16", shape)]
