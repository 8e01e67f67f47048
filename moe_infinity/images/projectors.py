"""The vision parts of GGUF models that load, one entry for each `clip.projector_type`: which model
it belongs to, and how config, names and processor follow from its file. llama.cpp's converter only
renames, but for the embedding of patches.

An entry is added when the tests compare the model with transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_infinity.checkpoint.headers import StoredTensor

POSITIONS = "v.position_embd.weight"
Tensors = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class Projector:
    """One value of `clip.projector_type`."""

    architecture: str  # of the text model's file
    model_type: str  # of transformers, for both together
    towers: tuple[str, ...]  # how names of parameters of the vision part begin
    renamed: tuple[tuple[str, str], ...]  # parts of their names, as the gguf package knows them
    fields: Mapping[str, str]  # of the vision config, by key of `clip.vision.`
    derived: Callable[[Tensors], dict[str, Any]]  # fields of it that follow from tensors
    tokens: Mapping[str, str]  # of the vocabulary, by field of the config; the first is an image's
    settings: Mapping[str, str]  # of transformers' image processor, by key of `clip.vision.`
    fixed: Mapping[str, Any] = field(default_factory=dict)  # settings that no metadata say
    text: Mapping[str, Any] = field(default_factory=dict)  # of the text model's config
    # Texts of the vocabulary that transformers' processor asks its tokenizer for.
    asked: Mapping[str, str] = field(default_factory=dict)


def _qwen(tensors: Tensors) -> dict[str, Any]:
    return {"num_position_embeddings": tensors[POSITIONS].shape[0]}


def _gemma4(tensors: Tensors) -> dict[str, Any]:
    head_dim = tensors["v.blk.0.attn_q_norm.weight"].shape[0]
    return {
        "head_dim": head_dim,
        "num_key_value_heads": tensors["v.blk.0.attn_k.weight"].shape[0] // head_dim,
        "position_embedding_size": tensors[POSITIONS].shape[1],
        "standardize": "v.std_bias" in tensors,
        "use_clipped_linears": any(name.endswith(".input_max") for name in tensors),
    }


PROJECTORS = {
    "gemma4v": Projector(
        architecture="gemma4",
        model_type="gemma4",
        towers=("model.vision_tower.", "model.embed_vision."),
        renamed=(("model.vision_tower.encoder.", "vision_model.model."), (".linear.", ".")),
        fields={
            "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
            "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
            "patch_size": "patch_size", "projector.scale_factor": "pooling_kernel_size",
            "attention.layer_norm_epsilon": "rms_norm_eps",
        },
        derived=_gemma4,
        tokens={
            "image_token_id": "<|image|>", "boi_token_id": "<|image>", "eoi_token_id": "<image|>",
            "audio_token_id": "<|audio|>", "boa_token_id": "<|audio>",
            "eoa_token_index": "<audio|>", "video_token_id": "<|video|>",
        },
        settings={"patch_size": "patch_size", "projector.scale_factor": "pooling_kernel_size"},
        # llama.cpp does so for all but E2B and E4B, which have no routed experts (mtmd.cpp).
        text={"use_bidirectional_attention": "vision"},
        asked={
            "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
            "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
        },
    ),
    "qwen3vl_merger": Projector(
        architecture="qwen35moe",
        model_type="qwen3_5_moe",
        towers=("model.visual.",),
        renamed=(
            ("model.visual.merger.norm", "v.post_ln"), ("model.visual.merger.linear_fc1", "mm.0"),
            ("model.visual.merger.linear_fc2", "mm.2"), ("model.visual.", "visual."),
        ),
        fields={
            "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
            "block_count": "depth", "attention.head_count": "num_heads",
            "patch_size": "patch_size", "spatial_merge_size": "spatial_merge_size",
            "projection_dim": "out_hidden_size",
        },
        derived=_qwen,
        tokens={
            "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
        },
        settings={
            "patch_size": "patch_size", "spatial_merge_size": "merge_size",
            "image_mean": "image_mean", "image_std": "image_std",
            "image_min_pixels": "shortest_edge", "image_max_pixels": "longest_edge",
        },
        # As in preprocessor_config.json of Qwen3.5: an image has 64 to 16,384 tokens.
        fixed={"temporal_patch_size": 2, "shortest_edge": 256**2, "longest_edge": 4096**2},
    ),
}  # fmt: skip
