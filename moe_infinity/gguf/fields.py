"""How the configs of GGUF files follow from their metadata, one entry for each architecture: beyond
the fields that transformers' own table of metadata gives another that is alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

from moe_infinity.gguf import derived, latent
from moe_infinity.gguf.file import GgufModel


@dataclass(frozen=True, slots=True)
class Metadata:
    """How a config is made of a file's metadata, where they are enough for it."""

    model_type: str  # of transformers
    like: str  # its entry in transformers' table of metadata
    # What the entry lacks: the field of a key, or None for a key that says nothing of the config.
    more: Mapping[str, str | None] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # what no metadata say
    yarn: Mapping[str, Any] = field(default_factory=dict)  # what metadata do not say of it
    has_positions: bool = True  # False: nothing is rotated
    has_partial_rotary: bool = False  # heads may have more columns than are rotated
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # where others are
    whole: str | None = None  # the class of text and images, where there is none of text alone
    # Fields that more than one key, or the values of several layers, decide.
    derived: Callable[[GgufModel], dict[str, Any]] = lambda gguf: {}


def _hybrid_qwen(model_type: str, fields: Mapping[str, str | None], **others: Any) -> Metadata:
    """Return what Qwen's models with linear attention have in common, and `fields` and `others`."""
    more = {**QWEN_FIELDS, **SHARED_EXPERT, **DELTA_NET_FIELDS, **fields}
    return Metadata(model_type, "qwen3_moe", more, has_partial_rotary=True, **others)


# Fields of the config by keys of the metadata.
QWEN_FIELDS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
}
SHARED_EXPERT = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
DELTA_NET_FIELDS = {
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
}  # fmt: skip
QWEN4_FIELDS = {
    "attention.indexer.head_count": "indexer_n_heads", "expert_weights_norm": None,
    "attention.indexer.key_length": "indexer_head_dim", "hyper_connection.count": "hc_count",
    "attention.indexer.top_k": "indexer_budget", "hyper_connection.low_rank": "hc_lowrank",
    "ple.conv_kernel": "ple_conv_kernel_size", "ple.heads_per_ngram": "heads_per_ngram",
    "ple.ngram_size": "ngram_size",
}  # fmt: skip
DEEPSEEK4_FIELDS = {
    "attention.compress_rope_freq_base": "compress_rope_theta", "feed_forward_length": None,
    "attention.indexer.head_count": "index_n_heads", "expert_count": "n_routed_experts",
    "attention.indexer.key_length": "index_head_dim", "expert_shared_count": "n_shared_experts",
    "attention.indexer.top_k": "index_topk", "expert_weights_norm": "norm_topk_prob",
    "attention.output_group_count": "o_groups", "expert_weights_scale": "routed_scaling_factor",
    "attention.output_lora_rank": "o_lora_rank", "hash_layer_count": "num_hash_layers",
    "attention.q_lora_rank": "q_lora_rank", "hyper_connection.count": "hc_mult",
    "attention.sliding_window": "sliding_window", "hyper_connection.epsilon": "hc_eps",
    "expert_feed_forward_length": "moe_intermediate_size", "swiglu_clamp_exp": "swiglu_limit",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
}  # fmt: skip
GRANITE_SCALES = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
GRANITE_FIELDS = {
    "attention.head_count_kv": None,
    "expert_shared_feed_forward_length": "shared_intermediate_size",
    "ssm.conv_kernel": "mamba_d_conv", "ssm.group_count": "mamba_n_groups",
    "ssm.state_size": "mamba_d_state", "ssm.time_step_rank": "mamba_n_heads",
}  # fmt: skip
GEMMA4_FIELDS = {
    "attention.head_count_kv": None, "attention.key_length": None, "feed_forward_length": None,
    "rope.freq_base": None, "attention.key_length_swa": "head_dim", "expert_count": "num_experts",
    "attention.shared_kv_layers": "num_kv_shared_layers", "expert_used_count": "top_k_experts",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "expert_feed_forward_length": "moe_intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
LFM2_FIELDS = {
    "attention.head_count_kv": None, "attention.layer_norm_rms_epsilon": "norm_eps",
    "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "num_experts_per_tok", "leading_dense_block_count": "num_dense_layers",
}  # fmt: skip
NEMOTRON_FIELDS = {
    "attention.head_count_kv": None, "attention.layer_norm_rms_epsilon": None,
    "feed_forward_length": None, "expert_count": "n_routed_experts",
    "expert_feed_forward_length": "moe_intermediate_size", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob", "expert_weights_scale": "routed_scaling_factor",
    "moe_latent_size": "moe_latent_size", "ssm.conv_kernel": "conv_kernel",
    "ssm.group_count": "n_groups", "ssm.state_size": "ssm_state_size",
    "ssm.time_step_rank": "mamba_num_heads",
}  # fmt: skip
LOCAL_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
# Of models whose experts are called routed ones, in configs.
ROUTED_FIELDS = {
    "expert_count": "n_routed_experts", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts", "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}  # fmt: skip
# What llama.cpp does where a key is absent.
ROUTED = {
    "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}  # fmt: skip
LATENT_FIELDS = {
    "attention.head_count_kv": None, "attention.key_length": None,
    "attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank",
}  # fmt: skip
INDEX_FIELDS = {
    "attention.indexer.head_count": "index_n_heads", "attention.indexer.top_k": "index_topk",
    "attention.indexer.key_length": "index_head_dim",
}  # fmt: skip
WINDOW = {"attention.sliding_window": "sliding_window"}
DENSE_FIRST = {"leading_dense_block_count": "first_k_dense_replace"}
OF_SIGMOID = {"expert_gating_func": (2, 0)}  # whether the file says so or not
AFMOE_FIELDS = WINDOW | QWEN_FIELDS | {
    "expert_shared_count": "num_shared_experts", "expert_weights_norm": None,
    "expert_weights_scale": "route_scale", "leading_dense_block_count": "num_dense_layers",
}  # fmt: skip
COHERE2_FIELDS = WINDOW | DENSE_FIRST | {
    "attention.layer_norm_rms_epsilon": None, "expert_feed_forward_length": "intermediate_size",
    "expert_shared_count": "num_shared_experts", "expert_weights_norm": "norm_topk_prob",
    "feed_forward_length": "prefix_dense_intermediate_size", "logit_scale": "logit_scale",
}  # fmt: skip
ERNIE_FIELDS = {
    "expert_count": "moe_num_experts", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "moe_num_shared_experts", "expert_used_count": "moe_k",
    "interleave_moe_layer_step": "moe_layer_interval",
    "leading_dense_block_count": "moe_layer_start_index",
}  # fmt: skip
EXAONE_FIELDS = WINDOW | ROUTED_FIELDS | {
    "expert_count": "num_experts", "expert_shared_count": "num_shared_experts",
}  # fmt: skip
GLM5_NEXT_FIELDS = ROUTED_FIELDS | LATENT_FIELDS | INDEX_FIELDS | {
    "attention.indexer.kpool": "index_kpool", "hyper_connection.count": "hc_mult",
    "hyper_connection.epsilon": "hc_eps", "kda.head_dim": "linear_head_dim",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
    "ssm.conv_kernel": "linear_conv_kernel_dim", "swiglu_clamp_exp": "swiglu_limit",
}  # fmt: skip
HY_V3_FIELDS = DENSE_FIRST | QWEN_FIELDS | {
    "expert_shared_count": "num_shared_experts", "expert_weights_norm": None,
    "expert_weights_scale": "router_scaling_factor",
}  # fmt: skip
JAMBA_FIELDS = {
    "attention.head_count_kv": None, "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state", "ssm.time_step_rank": "mamba_dt_rank",
}  # fmt: skip
KIMI_LINEAR_FIELDS = ROUTED_FIELDS | LATENT_FIELDS | {
    "context_length": "model_max_length", "expert_count": "num_experts",
    "expert_group_count": "num_expert_group", "expert_shared_count": "num_shared_experts",
    "expert_used_count": "num_experts_per_token", "expert_weights_norm": None,
    "kda.head_dim": "linear_head_dim", "ssm.conv_kernel": "linear_conv_kernel_dim",
}  # fmt: skip
LAGUNA_FIELDS = WINDOW | DENSE_FIRST | QWEN_FIELDS | SHARED_EXPERT | {
    "attention.head_count": None, "expert_weights_norm": None,
    "expert_weights_scale": "moe_routed_scaling_factor",
}  # fmt: skip
LLAMA4_FIELDS = LOCAL_EXPERTS | {
    "expert_feed_forward_length": "intermediate_size",
    "feed_forward_length": "intermediate_size_mlp",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
}  # fmt: skip
MIMO2_FIELDS = WINDOW | ROUTED_FIELDS | {
    "attention.head_count_kv": None, "attention.value_length": "v_head_dim",
    "attention.value_scale": "attention_value_scale",
}  # fmt: skip
MINIMAX_M3_FIELDS = LOCAL_EXPERTS | INDEX_FIELDS | DENSE_FIRST | {
    "attention.indexer.block_size": "index_block_size",
    "attention.indexer.local_blocks": "index_local_blocks",
    "attention.indexer.top_k": "index_topk_blocks",
    "expert_feed_forward_length": "intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "feed_forward_length": "dense_intermediate_size",
}  # fmt: skip
STEP35_FIELDS = WINDOW | QWEN_FIELDS | {
    "attention.head_count": None, "attention.head_count_kv": None,
    "expert_count": "n_routed_experts", "expert_shared_feed_forward_length": "share_expert_dim",
    "expert_weights_norm": None, "expert_weights_scale": "moe_router_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}  # fmt: skip
METADATA: dict[str, Metadata] = {
    "afmoe": Metadata(
        "afmoe", "qwen3_moe", AFMOE_FIELDS, {"mup_enabled": True, "num_shared_experts": 0},
        neutral=OF_SIGMOID, derived=derived.afmoe,
    ),
    "cohere2moe": Metadata(
        "cohere2_moe", "qwen3_moe", COHERE2_FIELDS,
        {"num_shared_experts": 0, "norm_topk_prob": False, "logit_scale": 1.0},
        neutral={"expert_gating_func": (2, 0, 1)}, derived=derived.cohere2,
    ),
    "deepseek2": Metadata(
        "deepseek_v3", "qwen3_moe", ROUTED_FIELDS | LATENT_FIELDS, ROUTED | {"q_lora_rank": None},
        neutral={"expert_gating_func": (2, 0, 1), "attention.temperature_scale": (0,)},
        derived=latent.deepseek2,
    ),
    "deepseek32": Metadata(
        "deepseek_v32", "qwen3_moe", ROUTED_FIELDS | LATENT_FIELDS | INDEX_FIELDS, ROUTED,
        neutral=OF_SIGMOID, derived=latent.indexed_attention,
    ),
    "deepseek4": Metadata(
        "deepseek_v4", "qwen3_moe", DEEPSEEK4_FIELDS,
        neutral={"expert_gating_func": (4,)},  # the square root of a softplus
        derived=derived.deepseek4,
    ),
    "dots1": Metadata(
        "dots1", "qwen3_moe", ROUTED_FIELDS, ROUTED | {"sliding_window": None},
        neutral=OF_SIGMOID, derived=derived.attention_bias,
    ),
    "ernie4_5-moe": Metadata(
        "ernie4_5_moe", "qwen3_moe", ERNIE_FIELDS, {"moe_num_shared_experts": 0},
        derived=derived.ernie,
    ),
    "exaone-moe": Metadata(
        "exaone_moe", "qwen3_moe", EXAONE_FIELDS, ROUTED, neutral=OF_SIGMOID,
        derived=derived.exaone,
    ),
    "gemma4": Metadata(
        "gemma4_text", "gemma3", GEMMA4_FIELDS, {"enable_moe_block": True}, derived=derived.gemma4
    ),
    "glm-dsa": Metadata(
        "glm_moe_dsa", "qwen3_moe", ROUTED_FIELDS | LATENT_FIELDS | INDEX_FIELDS, ROUTED,
        neutral=OF_SIGMOID, derived=latent.glm_dsa,
    ),
    "glm4moe": Metadata(
        "glm4_moe", "qwen3_moe", ROUTED_FIELDS, ROUTED, has_partial_rotary=True,
        neutral=OF_SIGMOID, derived=derived.glm4,
    ),
    "glm5-next": Metadata(
        "glm5_next", "qwen3_moe", GLM5_NEXT_FIELDS, ROUTED | {"swiglu_limit": inf},
        neutral=OF_SIGMOID,
        has_positions=False, whole="Glm5NextForConditionalGeneration", derived=latent.glm5_next,
    ),
    "gpt-oss": Metadata(
        "gpt_oss", "gpt_oss", WINDOW,
        yarn={"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}, derived=derived.gpt_oss,
    ),
    "granitehybrid": Metadata(
        "granitemoehybrid", "qwen2", LOCAL_EXPERTS | GRANITE_SCALES | GRANITE_FIELDS,
        derived=derived.granite_hybrid,
    ),
    "granitemoe": Metadata(
        "granitemoe", "qwen2", LOCAL_EXPERTS | GRANITE_SCALES,
        neutral={"rope.scaling.finetuned": (True,)},  # False: nothing is rotated
        derived=derived.granite,
    ),
    "hunyuan-moe": Metadata(
        "hunyuan_v1_moe", "qwen3_moe", {"expert_used_count": "moe_topk"},
        derived=derived.attention_bias,
    ),
    "hy_v3": Metadata(
        "hy_v3", "qwen3_moe", HY_V3_FIELDS, {"router_scaling_factor": 1.0}, neutral=OF_SIGMOID,
        derived=derived.dense_first,
    ),
    "jamba": Metadata(
        "jamba", "qwen2_moe", JAMBA_FIELDS, has_positions=False, derived=derived.jamba
    ),
    "kimi-linear": Metadata(
        "kimi_linear", "qwen3_moe", KIMI_LINEAR_FIELDS,
        {"q_lora_rank": None, "routed_scaling_factor": 1.0},
        neutral=OF_SIGMOID, derived=latent.kimi_linear,
    ),
    "laguna": Metadata(
        "laguna", "qwen3_moe", LAGUNA_FIELDS, neutral=OF_SIGMOID, derived=derived.laguna
    ),
    "lfm2moe": Metadata(
        "lfm2_moe", "lfm2", LFM2_FIELDS, neutral=OF_SIGMOID,
        derived=lambda gguf: derived.by_keys(gguf, "conv"),
    ),
    "llama": Metadata("mixtral", "llama", LOCAL_EXPERTS),
    "llama4": Metadata(
        "llama4_text", "qwen3_moe", LLAMA4_FIELDS,
        neutral={"attention.sliding_window": (8192,)},  # 0: of models without layers in chunks
        derived=derived.llama4,
    ),
    "mellum": Metadata(
        "mellum", "qwen3_moe", QWEN_FIELDS | WINDOW | {"expert_count": "num_local_experts"},
        {"norm_topk_prob": True}, derived=derived.mellum,
    ),
    "mimo2": Metadata(
        "mimo_v2_flash", "qwen3_moe", MIMO2_FIELDS, {"norm_topk_prob": True},
        neutral=OF_SIGMOID, derived=derived.mimo2,
    ),
    "minimax-m2": Metadata(
        "minimax_m2", "qwen3_moe", LOCAL_EXPERTS, has_partial_rotary=True, neutral=OF_SIGMOID
    ),
    "minimax-m3": Metadata(
        "minimax_m3_vl_text", "qwen3_moe", MINIMAX_M3_FIELDS, {"routed_scaling_factor": 1.0},
        has_partial_rotary=True,
        neutral=OF_SIGMOID, derived=derived.minimax_m3,
    ),
    "mistral4": Metadata(
        "mistral4", "qwen3_moe", ROUTED_FIELDS | LATENT_FIELDS,
        ROUTED | {"q_lora_rank": None, "architectures": ["Mistral4ForCausalLM"]},
        neutral={"attention.temperature_scale": (0,)}, derived=latent.mistral4,
    ),
    "nemotron_h_moe": Metadata(
        "nemotron_h", "qwen3_moe", NEMOTRON_FIELDS, {"norm_topk_prob": False},
        has_positions=False, neutral=OF_SIGMOID, derived=derived.nemotron,
    ),
    "olmoe": Metadata(
        "olmoe", "qwen2_moe",
        {"expert_weights_norm": "norm_topk_prob", "attention.clamp_kqv": "clip_qkv"},
    ),
    "qwen2moe": Metadata("qwen2_moe", "qwen2_moe", QWEN_FIELDS | SHARED_EXPERT),
    "qwen3moe": Metadata("qwen3_moe", "qwen3_moe", QWEN_FIELDS, {"norm_topk_prob": True}),
    "qwen3next": _hybrid_qwen(
        "qwen3_next", {}, fixed={"norm_topk_prob": True}, derived=derived.delta_net
    ),
    "qwen3vlmoe": Metadata(
        "qwen3_vl_moe", "qwen3_moe", QWEN_FIELDS | {"expert_count": "num_local_experts"},
        whole="Qwen3VLMoeForConditionalGeneration", derived=derived.qwen3_vl,
    ),
    "qwen35moe": _hybrid_qwen(
        "qwen3_5_moe_text", {"expert_weights_norm": None}, derived=derived.delta_net
    ),
    "qwen4exp": _hybrid_qwen(
        "qwen4_exp_text", QWEN4_FIELDS,
        # The config's defaults are others than what llama.cpp computes.
        fixed={"indexer_kv_heads": 1, "output_gate_type": "sigmoid"}, derived=derived.qwen4,
    ),
    "step35": Metadata(
        "step3p7", "qwen3_moe", STEP35_FIELDS, neutral=OF_SIGMOID,
        whole="Step3p7ForConditionalGeneration", derived=derived.step35,
    ),
}  # fmt: skip
