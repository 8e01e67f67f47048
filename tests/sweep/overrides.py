"""What the generic shrinker cannot know: settings of single architectures, and the reasons of those
that are compared otherwise or not at all. Every entry here is a wart of one architecture.
"""

from __future__ import annotations

from typing import Any

import torch

ATTENTION_TYPES = ["linear_attention", "full_attention"] * 2
MLP_TYPES = ["dense", "sparse", "sparse", "sparse"]
GEMMA4_TEXT = {
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 16,
    "per_layer_config": {3: {"head_dim": 32}},
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
INKLING_TEXT = {"logits_mup_width_multiplier": 1.0}  # 24: its logits would hardly differ
QWEN4_TEXT = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 16,
    "eos_token_id": 127,
}
NEMOTRON_H = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "moe_latent_size": 32,
}
QWEN3_OMNI_THINKER: dict[str, Any] = {"vision_start_token_id": 126}
QWEN3_OMNI_TALKER = {
    "text_config": {"shared_expert_intermediate_size": 40},
    "spatial_merge_size": 2,
    "num_code_groups": 4,
    "accept_hidden_layer": 2,
}

# Arguments of the config on top of the shrunk ones, by model class.
OVERRIDES: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {"layer_types": ATTENTION_TYPES},
    "Cohere2MoeForCausalLM": {"logit_scale": 1.0},  # 0.0625: its logits would hardly differ
    "DbrxForCausalLM": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "DeepseekOcr2ForConditionalGeneration": {"text_config": {"mlp_layer_types": MLP_TYPES}},
    "DeepseekV2ForCausalLM": {"topk_method": "group_limited_greedy"},
    "DeepseekV4ForCausalLM": {"mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]},
    "DiffusionGemmaForBlockDiffusion": {
        "text_config": {"global_head_dim": 32},
        "vision_config": {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96},
        "canvas_length": 8,
    },
    "DogeForCausalLM": {"is_moe": True, "num_experts": 16},
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "Dots3NoteForConditionalGeneration": {"vision_config": {"pyramid_num_routed": [0, 8, 8, 8]}},
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {
            "moe_intermediate_size": [64, 32],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 2, 4],
            },
        }
    },
    "Gemma4ForCausalLM": GEMMA4_TEXT,
    "Gemma4ForConditionalGeneration": {"text_config": GEMMA4_TEXT},
    "Glm4vMoeForConditionalGeneration": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
                "partial_rotary_factor": 0.5,
            }
        }
    },
    "Glm5NextForConditionalGeneration": {
        "text_config": {
            "qk_rope_head_dim": 0,
            "index_kpool": 2,
            "mlp_layer_types": MLP_TYPES,
            "num_key_value_heads": 4,
        }
    },
    "GraniteMoeHybridForCausalLM": {"layer_types": ATTENTION_TYPES},
    "HYV4VLForConditionalGeneration": {
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [1, 1, 2],
            },
        }
    },
    "InklingForCausalLM": INKLING_TEXT,
    "InklingForConditionalGeneration": {"text_config": INKLING_TEXT},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearForCausalLM": {"layer_types": ATTENTION_TYPES},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "LongcatFlashForCausalLM": {"zero_expert_num": 4},
    "Mistral4ForCausalLM": {"qk_nope_head_dim": 8},
    "NemotronHForCausalLM": NEMOTRON_H,
    "NemotronH_Omni_Reasoning_V3": {
        "text_config": NEMOTRON_H,
        "vision_config": {"video_temporal_patch_size": 2},
    },
    "Nemotron3_5TranscribeForConditionalGeneration": {
        "text_config": NEMOTRON_H,
        "word_timestamp_config": {"blank_token_id": 127},
    },
    "Qwen3OmniMoeForConditionalGeneration": {
        "thinker_config": QWEN3_OMNI_THINKER,
        "talker_config": QWEN3_OMNI_TALKER,
    },
    "Qwen3OmniMoeTalkerForConditionalGeneration": QWEN3_OMNI_TALKER,
    "Qwen3OmniMoeThinkerForConditionalGeneration": QWEN3_OMNI_THINKER,
    "Qwen4ExpForCausalLM": QWEN4_TEXT,
    "Qwen4ExpForConditionalGeneration": {"text_config": QWEN4_TEXT},
}

# Of weights and activations where not bfloat16.
DTYPES = {
    # Stock 5.17 multiplies a float32 activation with a bfloat16 weight and fails; 5.23 does not.
    "DeepseekV4ForCausalLM": torch.float32,
}

# Share of the largest logit by which ours may differ, and why. None does.
TOLERANCES: dict[str, tuple[float, str]] = {}

# MoE layers whose experts cannot be seen in the result.
UNSEEN_LAYERS: dict[str, list[int]] = {
    # Of the last encoder layer the decoder reads keys and values, which come before its experts.
    "DiffusionGemmaForBlockDiffusion": [3],
}

# (result, reason) of classes that are not compared with stock.
NOT_COMPARED: dict[str, tuple[str, str]] = {
    "DogeForCausalLM": ("not offloaded", "its experts are single rows of two embeddings"),
    "NllbMoeForConditionalGeneration": (
        "not compared",
        "stock runs experts 0 and 1 only; compared with a dense reference in "
        "tests/architectures/test_encoder_decoder.py",
    ),
    "Qwen3OmniMoeTalkerForConditionalGeneration": (
        "not offloaded",
        "no config of its own, runs as part of Qwen3OmniMoeForConditionalGeneration",
    ),
}
