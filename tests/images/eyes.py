"""The settings of tiny models that see images, in the manner of the real ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.sweep import tiny
from tests.sweep.discover import Architecture, architectures_in


@dataclass(frozen=True)
class Eyes:
    """One architecture: its folder in transformers, its special tokens, how a template shows an
    image, changes of the tiny config, preprocessor_config.json, names of special tokens, and
    processor_config.json."""

    folder: str
    tokens: tuple[str, ...]
    place: str
    config: Callable[[dict[str, int]], dict[str, Any]]
    processor: dict[str, Any]
    tokenizer: dict[str, str] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    is_batched: bool = True  # False: a server takes one request at a time

    @property
    def architecture(self) -> Architecture:
        found = architectures_in(self.folder)
        return next(each for each in found if each.name.endswith("ForConditionalGeneration"))


QWEN_PIXELS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 16 * 32 * 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"


def qwen_config(ids: dict[str, int]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": {
            "rope_parameters": rope,
            "sliding_window": None,  # its attention ignores one, and no real model has one
        },
        "vision_config": {
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 16,
            "patch_size": 16,
        },
    }


def qwen3_5_config(ids: dict[str, int]) -> dict[str, Any]:
    changes = qwen_config(ids)
    changes["text_config"]["rope_parameters"] |= {"partial_rotary_factor": 0.5}
    changes["text_config"]["rope_parameters"]["mrope_section"] = [2, 1, 1]
    del changes["vision_config"]["deepstack_visual_indexes"]
    return changes


GLM_TOKENS = ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>")
GLM_PLACE = "<|begin_of_image|><|image|><|end_of_image|>"


def glm_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "image_start_token_id": ids["<|begin_of_image|>"],
        "image_end_token_id": ids["<|end_of_image|>"],
        "vision_config": {"patch_size": 16, "image_size": 64},
    }


ERNIE_TOKENS = (
    "<|IMAGE_START|>", "<|IMAGE_END|>", "<|image|>",
    "<|VIDEO_START|>", "<|VIDEO_END|>", "<|video|>",
)  # fmt: skip


def ernie_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "image_token_id": ids["<|image|>"],
        "image_start_token_id": ids["<|IMAGE_START|>"],
        "image_end_token_id": ids["<|IMAGE_END|>"],
        "video_token_id": ids["<|video|>"],
        "video_start_token_id": ids["<|VIDEO_START|>"],
        "video_end_token_id": ids["<|VIDEO_END|>"],
        "vision_config": {"patch_size": 16},
    }


def aria_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "image_token_index": ids["<|img|>"],
        "projector_patch_to_query_dict": {49: 8},
        "vision_config": {"image_size": 980, "patch_size": 140},
    }


GEMMA_TOKENS = ("<boi>", "<eoi>", "<image>", "<boa>", "<eoa>", "<audio>", "<|video|>")


def gemma_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "image_token_id": ids["<image>"],
        "boi_token_id": ids["<boi>"],
        "eoi_token_id": ids["<eoi>"],
        "audio_token_id": ids["<audio>"],
        "boa_token_id": ids["<boa>"],
        "eoa_token_id": ids["<eoa>"],
        "video_token_id": ids["<|video|>"],
        "audio_config": None,
        "text_config": {"sliding_window": 96},  # of which an image has 70
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "position_embedding_size": 1024,
        },
    }


LLAMA_TOKENS = (
    "<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>",
    "<|tile_x_separator|>", "<|tile_y_separator|>",
)  # fmt: skip


def llama_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "image_token_index": ids["<|patch|>"],
        "vision_config": {
            "image_size": 56,
            "patch_size": 14,
            "intermediate_size": 4 * tiny.WIDTH,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
    }


KIMI_TOKENS = (
    "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>",
    "<|kimi_k25_video_placeholder|>",
)  # fmt: skip


def kimi_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "image_token_id": ids["<|media_pad|>"],
        "video_token_id": ids["<|kimi_k25_video_placeholder|>"],
        "vision_start_token_id": ids["<|media_begin|>"],
        "vision_end_token_id": ids["<|media_end|>"],
        "projection_hidden_size": 64,
    }


MINIMAX_TOKENS = (
    "]<]image[>[", "]<]video[>[", "]<]start of image[>[", "]<]end of image[>[",
)  # fmt: skip


def minimax_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "image_token_index": ids["]<]image[>["],
        "video_token_index": ids["]<]video[>["],
        "merged_hidden_size": 4 * tiny.WIDTH,  # newer transformers work it out
        "text_config": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
        "vision_config": {"image_size": 56},
    }


EYES = {
    "qwen3_vl_moe": Eyes("qwen3_vl_moe", QWEN_TOKENS, QWEN_PLACE, qwen_config, QWEN_PIXELS),
    "qwen3_5_moe": Eyes("qwen3_5_moe", QWEN_TOKENS, QWEN_PLACE, qwen3_5_config, QWEN_PIXELS),
    "glm4v_moe": Eyes(
        "glm4v_moe",
        GLM_TOKENS,
        GLM_PLACE,
        glm_config,
        QWEN_PIXELS | {"image_processor_type": "Glm4vImageProcessor"},
    ),
    "ernie4_5_vl_moe": Eyes(
        "ernie4_5_vl_moe",
        ERNIE_TOKENS,
        "<|IMAGE_START|><|image|><|IMAGE_END|>",
        ernie_config,
        QWEN_PIXELS
        | {"image_processor_type": "Ernie4_5_VLMoeImageProcessor", "temporal_patch_size": 1},
        {
            "image_token": "<|image|>",
            "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>",
            "video_token": "<|video|>",
            "video_start_token": "<|VIDEO_START|>",
            "video_end_token": "<|VIDEO_END|>",
        },
        {
            "processor_class": "Ernie4_5_VLMoeProcessor",
            "video_processor": {  # else it wants a font
                "video_processor_type": "Ernie4_5_VLMoeVideoProcessor",
                "draw_on_frames": False,
            },
        },
    ),
    "aria": Eyes(
        "aria",
        ("<fim_prefix>", "<fim_suffix>", "<|img|>"),
        "<fim_prefix><|img|><fim_suffix>",
        aria_config,
        {
            "image_processor_type": "AriaImageProcessor",
        },
        {"image_token": "<|img|>"},
        {"processor_class": "AriaProcessor", "size_conversion": {"490": 8, "980": 8}},
    ),
    "gemma4": Eyes(
        "gemma4",
        GEMMA_TOKENS,
        "<image>",
        gemma_config,
        {"image_processor_type": "Gemma4ImageProcessor", "max_soft_tokens": 70},
        {
            "image_token": "<image>",
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            "audio_token": "<audio>",
            "boa_token": "<boa>",
            "eoa_token": "<eoa>",
        },
    ),
    "llama4": Eyes(
        "llama4",
        LLAMA_TOKENS,
        "<|image|>",
        llama_config,
        {
            "image_processor_type": "Llama4ImageProcessor",
            "size": {"height": 56, "width": 56},
            "max_patches": 4,
        },
        more={"processor_class": "Llama4Processor"},
    ),
    "kimi_k25": Eyes(
        "kimi_k25",
        KIMI_TOKENS,
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        kimi_config,
        {"image_processor_type": "Kimi_K25ImageProcessor", "max_patches": 64},
    ),
    "minimax_m3_vl": Eyes(
        "minimax_m3_vl",
        MINIMAX_TOKENS,
        "]<]image[>[",
        minimax_config,
        {
            "image_processor_type": "MiniMaxM3VLImageProcessor",
            "size": {"shortest_edge": 56 * 56, "longest_edge": 8 * 56 * 56},
        },
        is_batched=False,
    ),
}
