"""Settings of tiny models of which GGUF files are made, one for each class of transformers."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": None, "pad_token_id": 0, "intermediate_size": 96, "num_experts_per_tok": 3,
    "rope_theta": 5000.0, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 8, "moe_intermediate_size": 96, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4, "q_lora_rank": 32,
}  # fmt: skip
DENSE_FIRST = {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}
# By model_type of transformers.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {
        "num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 128,
    },
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 96, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8, "num_key_value_heads": 4},
    "gpt_oss": {
        "num_local_experts": 8, "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
        },
    },
    "granitemoe": {
        "num_local_experts": 8, "attention_multiplier": 0.3, "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5, "logits_scaling": 3.0,
    },
    "granitemoeshared": {"num_local_experts": 8, "shared_intermediate_size": 64},
    "deepseek_v2": DEEPSEEK | {"first_k_dense_replace": 0},
    "deepseek_v3": DEEPSEEK | {
        "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    },
    "glm4_moe": {
        "n_routed_experts": 8, "moe_intermediate_size": 96, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1,
    },
    "phimoe": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True,
        "lm_head_bias": True, "sliding_window": None,
    },
    "llama4_text": {
        "num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 96,
        "interleave_moe_layer_step": 2, "num_hidden_layers": 4, "attention_chunk_size": 8192,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 8, "moe_intermediate_size": 96, "moe_k": 3, "moe_layer_start_index": 1,
        "moe_num_shared_experts": 2, "intermediate_size": 384,
    },
    "minimax_m2": {"num_local_experts": 8},
    "qwen3_next": {
        "num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64,
        "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "qwen3_5_moe_text": {
        "num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64,
        "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    },
    "qwen3_vl_moe": {
        "num_experts": 8, "moe_intermediate_size": 96, "num_hidden_layers": 3,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [3, 3, 2],
        },
        "vision_config": {
            "depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
            "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
    },
    "minimax_m3_vl_text": {
        "num_local_experts": 8, "num_hidden_layers": 3, "dense_intermediate_size": 128,
        "shared_intermediate_size": 96, "rotary_dim": 8, "routed_scaling_factor": 2.5,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "index_n_heads": 2,
        "index_head_dim": 16, "index_block_size": 8, "index_topk_blocks": 3,
        "index_local_blocks": 1,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
        },
    },
    "deepseek_v4": {
        "n_routed_experts": 8, "moe_intermediate_size": 96, "num_hidden_layers": 4,
        "num_key_value_heads": 1, "head_dim": 64, "partial_rotary_factor": 0.25,
        "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 24, "sliding_window": 16,
        "layer_types": ["sliding_attention", *["compressed_sparse_attention"] * 2,
                        "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe"] + ["moe"] * 3, "hc_sinkhorn_iters": 5, "hc_eps": 1e-4,
        "index_n_heads": 4, "index_head_dim": 128, "index_topk": 16, "swiglu_limit": 0.5,
        "routed_scaling_factor": 2.5, "compress_rope_theta": 500.0,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "qwen4_exp_text": {
        "num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64,
        "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16, "output_gate_type": "sigmoid",
        "hc_count": 3, "hc_lowrank": 24, "eos_token_id": 7, "ple_layer_ids": [2],
        "ple_embed_dim": 64, "ngram_vocab_size_base": 50, "heads_per_ngram": 2, "seed": 5,
        "make_ngram_vocab_size_divisible_by": 32, "split_ngram_parts": 2,
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 48, "indexer_compress_ratio": 4,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
    },
    "gemma4_text": {
        "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 96,
        "enable_moe_block": True, "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "global_head_dim": 32,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 16,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 5000.0, "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "lfm2_moe": {
        "num_experts": 8, "moe_intermediate_size": 96, "num_hidden_layers": 4,
        "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
    "dots1": {
        "n_routed_experts": 8, "moe_intermediate_size": 96, "n_group": 1, "topk_group": 1,
        "num_key_value_heads": 4,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
        "layer_types": ["full_attention"] * 2,
    },
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 3},
    "granitemoehybrid": {
        "num_local_experts": 8, "shared_intermediate_size": 64, "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2, "mamba_n_heads": 8,
        "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 32,
        "attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
    },
    "nemotron_h": {
        "n_routed_experts": 8, "moe_intermediate_size": 96, "n_group": 1, "topk_group": 1,
        "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 2.5,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2,
        "chunk_size": 32,
    },
    "afmoe": {
        "num_experts": 8, "moe_intermediate_size": 96, "num_hidden_layers": 4,
        "num_dense_layers": 1, "num_shared_experts": 1, "route_scale": 2.5, "sliding_window": 16,
        "mup_enabled": True, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "exaone_moe": {
        "num_experts": 8, "moe_intermediate_size": 96, "num_hidden_layers": 4,
        "first_k_dense_replace": 1, "sliding_window": 16,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    "glm4_moe_lite": DEEPSEEK | DENSE_FIRST,
    "mistral4": DEEPSEEK | {
        "head_dim": 48,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 64, "mscale": 1.0,
            "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    "glm_moe_dsa": DEEPSEEK | DENSE_FIRST | {
        "index_topk": 16, "index_head_dim": 128, "index_n_heads": 4,
    },
    "glm5_next": DEEPSEEK | {
        "qk_rope_head_dim": 0, "num_hidden_layers": 4,
        "layer_types": ["linear_attention", *["full_attention"] * 2, "linear_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3, "index_topk": 16, "index_kpool": 4,
        "indexer_types": ["full", "full", "shared", "full"], "index_head_dim": 128,
        "index_n_heads": 4, "linear_head_dim": 16, "linear_num_heads": 4,
        "linear_lower_bound": -2.0, "swiglu_limit": 0.5, "hc_sinkhorn_iters": 5, "hc_eps": 1e-4,
        "routed_scaling_factor": 2.5,
        "vision_config": {
            "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16,
            "out_hidden_size": 64, "projection_intermediate_size": 16, "image_size": 28,
        },
    },
    "jamba": {
        "num_experts": 8, "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16,
        "mamba_dt_rank": 8, "use_mamba_kernels": False,
    },
    "kimi_linear": DEEPSEEK | {
        "q_lora_rank": None, "num_experts": 8, "num_experts_per_token": 3, "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3, "linear_head_dim": 16, "linear_num_heads": 4,
    },
    "cohere2_moe": {
        "num_experts": 8, "num_hidden_layers": 4, "sliding_window": 16, "logit_scale": 1.0,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "tie_word_embeddings": True,
    },
    "deepseek_v32": DEEPSEEK | DENSE_FIRST | {
        "index_topk": 16, "index_head_dim": 128, "index_n_heads": 4, "n_group": 2, "topk_group": 1,
    },
    "hy_v3": DENSE_FIRST | {"num_experts": 8, "moe_intermediate_size": 96},
    "laguna": {
        "num_experts": 8, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 64,
        "num_hidden_layers": 4, "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
        "sliding_window": 16,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {
                "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0,
            },
        },
    },
    "mellum": {
        "num_local_experts": 8, "moe_intermediate_size": 96, "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "mimo_v2_flash": {
        "n_routed_experts": 8, "moe_intermediate_size": 96, "num_hidden_layers": 4,
        "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 16,
        "mlp_layer_types": ["dense"] + ["sparse"] * 3, "head_dim": 48, "v_head_dim": 32,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.334,
            },
            "sliding_attention": {
                "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.334,
            },
        },
    },
    "solar_open": {"n_routed_experts": 8, "moe_intermediate_size": 96, "num_hidden_layers": 3},
    "step3p7": {
        "n_routed_experts": 8, "moe_intermediate_size": 96, "share_expert_dim": 64,
        "num_hidden_layers": 4, "layer_types": ["full_attention", *["sliding_attention"] * 2,
                                                "full_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3, "num_sliding_attention_heads": 6,
        "sliding_window": 16, "moe_router_scaling_factor": 2.5,
        "swiglu_limits": [None, 0.02, None, 0.05], "swiglu_limits_shared": [0.0, None, 0.05, 0.02],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "llama3", "rope_theta": 5000.0, "partial_rotary_factor": 0.5,
                "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
                "original_max_position_embeddings": 120,
            },
            "sliding_attention": {
                "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0,
            },
        },
        "vision_config": {
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
            "max_position_embeddings": 4,
        },
    },
}  # fmt: skip
WIDE = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}  # K-quants
