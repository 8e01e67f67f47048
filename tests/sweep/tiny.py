"""A tiny random model of any architecture: known names of sizes are made small in its config and in
all sub-configs, the few others come from overrides.py.

Nothing per layer is passed on unless overridden, so that the config class works it out for few
layers as it does for many.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from transformers import PretrainedConfig

from tests.sweep.discover import NUM_EXPERTS, Architecture
from tests.sweep.overrides import DTYPES, OVERRIDES

VOCAB_SIZE = 128
NUM_EXPERTS_EACH = 8
WIDTH = 64
NUM_HEADS = 4
PROMPT = torch.arange(3, 3 + 22).view(2, 11) * 5 % VOCAB_SIZE  # two sequences

# By name, whatever the architecture. Where a config does not have the name, nothing happens.
SIZES: dict[str, Any] = {
    **dict.fromkeys(
        ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), VOCAB_SIZE
    ),
    **dict.fromkeys(("hidden_size", "d_model", "out_hidden_size", "text_hidden_size"), WIDTH),
    **dict.fromkeys(("output_dim", "router_hidden_size", "thinker_hidden_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "dense_intermediate_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("ffn_hidden_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 40),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "share_expert_dim"), 40),
    "shared_experts_intermediate_size": 40,
    **dict.fromkeys(("num_hidden_layers", "n_layers", "num_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("depth", "encoder_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads"), NUM_HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), NUM_HEADS),
    **dict.fromkeys(("swa_num_attention_heads", "num_sliding_attention_heads"), NUM_HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "kv_n_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "d_kv", "kv_channels", "global_head_dim"), 16),
    **dict.fromkeys(("q_lora_rank", "o_lora_rank", "index_head_dim"), 24),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    # Of vision and audio towers.
    **dict.fromkeys(("decoder_dim", "output_channels", "codebook_size", "mel_vocab_size"), 64),
    **dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 64),
    **dict.fromkeys(("projector_hidden_size", "merged_hidden_size", "n_mel_bins"), 64),
    **dict.fromkeys(("vision_hidden_size", "audio_hidden_size", "adapter_input_size"), 64),
    **dict.fromkeys(("adapter_in_dim", "adapter_out_dim", "downsample_hidden_size"), 64),
    "downsample_channels": [64, 64],
    "index_n_heads": 2,
    "index_topk": 4,
    "n_group": 4,
    "topk_group": 2,
    "num_expert_group": 4,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    **dict.fromkeys(("sliding_window", "sliding_window_size"), 16),
    "max_position_embeddings": 256,
    "max_seq_len": 256,
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 8),
    **dict.fromkeys(("mamba_head_dim", "ssm_state_size", "mamba_d_state"), 16),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    "mamba_d_head": "auto",
    "n_groups": 2,
    "linear_num_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    "bos_token_id": 1,
    "eos_token_id": None,  # nothing ends a sequence early
    "pad_token_id": 0,
    **dict.fromkeys(("dropout", "dropout_rate", "attention_dropout"), 0.0),
}
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)


def shrink(config: PretrainedConfig) -> dict[str, Any]:
    """The arguments that make a tiny config of the same class."""
    given = vars(config)
    sizes = {name: value for name, value in SIZES.items() if name in given}
    for name, value in given.items():
        if isinstance(value, PretrainedConfig):
            sizes[name] = {"model_type": value.model_type} if value.model_type else {}
            sizes[name] |= shrink(value)
        elif NUM_EXPERTS.search(name):
            sizes[name] = NUM_EXPERTS_EACH
        elif name in TOP_K:
            sizes[name] = 3 if value != 1 else 1
    if given.get("num_key_value_heads", 0) == given.get("num_attention_heads"):  # not grouped
        sizes["num_key_value_heads"] = NUM_HEADS
    if "qk_rope_head_dim" in given and given.get("head_dim") == given["qk_rope_head_dim"]:
        sizes["head_dim"] = sizes["qk_rope_head_dim"]  # another name for it
    return sizes


def merge(arguments: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` on top, sub-config by sub-config."""
    merged = dict(arguments)
    for name, value in changes.items():
        below = merged.get(name)
        is_inner = isinstance(value, dict) and isinstance(below, dict)
        merged[name] = merge(below, value) if is_inner else value  # type: ignore[arg-type]
    return merged


def tiny_config(architecture: Architecture) -> Any:
    """A config of few small layers with 8 experts."""
    arguments = shrink(architecture.config_class())
    return architecture.config_class(**merge(arguments, OVERRIDES.get(architecture.name, {})))


def tiny_model(architecture: Architecture) -> Any:
    """A tiny model with random weights."""
    return random_model(architecture, tiny_config(architecture))


@torch.no_grad()
def random_model(architecture: Architecture, config: Any) -> Any:
    """Random bf16 weights, wide enough that the logits depend on every expert and that different
    tokens are routed differently."""
    torch.manual_seed(0)
    dtype = DTYPES.get(architecture.name, torch.bfloat16)
    model = architecture.model_class._from_config(config, dtype=dtype)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if isinstance(tensor, torch.nn.Parameter) and tensor.ndim > 1:
            tensor.normal_(std=0.15)
        elif name.endswith("bias") and tensor.is_floating_point():  # also those that only route
            tensor.normal_(std=0.05)
        elif name.endswith("tid2eid"):  # which experts a token id is sent to; all zero when new
            experts = torch.rand(VOCAB_SIZE, NUM_EXPERTS_EACH).argsort(dim=1)
            tensor.copy_(experts[:, : tensor.shape[1]])
    return model.eval()
