"""Configs of models that people run, by a short name, and the type that most of their files have.

They say what is known of the models' config.json; nobody compared them with the files on the hub.
GLM-4.7-Flash, Qwen3-Next, DeepSeek-V4-Flash and MiniMax-M3 have the defaults of their classes in
transformers 5.24, which give 29.9, 79.7, 284 and 426 billion parameters. The width of
Qwen3.8-Flash-Next and of its experts follow from 125 billion parameters and a table of 51 billion.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from scripts.hollow_checkpoints import PUBLISHED


class ModelShape(NamedTuple):
    config: dict[str, Any]
    mix: str


def _published(model: str) -> dict[str, Any]:
    """The config of an entry of PUBLISHED, without what only describes packed weights."""
    return {
        name: value for name, value in PUBLISHED[model].items() if name != "quantization_config"
    }


QWEN36: dict[str, Any] = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 248320, "hidden_size": 2048,
    "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
}  # fmt: skip
FLASH_NEXT: dict[str, Any] = QWEN36 | {
    "model_type": "qwen4_exp_text", "hidden_size": 2560, "num_hidden_layers": 48,
    "num_attention_heads": 24, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "ple_layer_ids": [2],
    "eos_token_id": 248044, "output_gate_type": "sigmoid", "indexer_n_heads": 4,
    "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}  # fmt: skip
MINIMAX_M3: dict[str, Any] = {
    "model_type": "minimax_m3_vl_text", "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 57,
    "layer_types": ["full_attention"] * 3 + ["minimax_m3_sparse"] * 57,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 2816,
    "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 256, "global_head_dim": 512,
    "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
    "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
    "moe_intermediate_size": 704, "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144, "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
YARN = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
    }
}  # fmt: skip

SHAPES = {
    "qwen3-30b-a3b": ModelShape(_published("Qwen/Qwen3-30B-A3B"), "q4_k_m"),
    "qwen3.6-35b-a3b": ModelShape(QWEN36, "q4_k_m"),
    "gpt-oss-20b": ModelShape(_published("openai/gpt-oss-20b") | YARN, "mxfp4"),
    "deepseek-v2-lite": ModelShape(_published("deepseek-ai/DeepSeek-V2-Lite"), "q4_k_m"),
    "gemma4-26b-a4b": ModelShape(GEMMA4, "q4_k_m"),
    "glm-4.7-flash": ModelShape({"model_type": "glm4_moe_lite"}, "q4_k_m"),
    "qwen3-next-80b-a3b": ModelShape({"model_type": "qwen3_next"}, "q4_k_m"),
    "qwen3.8-flash-next": ModelShape(FLASH_NEXT, "q4_k_m"),
    "deepseek-v4-flash": ModelShape({"model_type": "deepseek_v4"}, "mxfp4"),
    "minimax-m3": ModelShape(MINIMAX_M3, "q4_k_m"),
}
