"""The block structure of Snowflake Arctic, written from its published configuration and tensor
names: beside attention a dense residual MLP, and from the layer's own input a mixture of experts.

    h   = x + attention(input_layernorm(x))
    out = h + residual_mlp(residual_layernorm(h)) + moe(post_attention_layernorm(x))

Only every `moe_layer_frequency`-th layer is like this; the others hold one plain MLP. The loop goes
over all experts with torch.where on a one-hot mask and skips those without tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from .modeling_base import Attention, CausalLM, Decoder, RMSNorm


class ArcticConfig(PretrainedConfig):  # type: ignore[misc]
    model_type = "arctic"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 128,
        hidden_size: int = 64,
        intermediate_size: int = 48,
        num_hidden_layers: int = 4,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        num_local_experts: int = 8,
        num_experts_per_tok: int = 2,
        moe_layer_frequency: int = 2,
        use_residual: bool = True,
        parallel_attn_mlp_res: bool = True,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        max_position_embeddings: int = 256,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.num_local_experts = num_local_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.moe_layer_frequency = moe_layer_frequency
        self.use_residual = use_residual
        self.parallel_attn_mlp_res = parallel_attn_mlp_res
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class ArcticMLP(nn.Module):
    def __init__(self, config: ArcticConfig, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, width, bias=False)
        self.w2 = nn.Linear(width, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.act_fn(self.w1(x)) * self.w3(x))


class ArcticMoE(nn.Module):
    """Routed experts where the layer is to have them, else one MLP."""

    def __init__(self, config: ArcticConfig, layer_idx: int) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.num_local_experts
        self.is_moe_layer = (layer_idx + 1) % config.moe_layer_frequency == 0
        if self.is_moe_layer:
            self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
            self.experts = nn.ModuleList(
                ArcticMLP(config, config.intermediate_size) for _ in range(self.num_experts)
            )
        else:
            self.mlp = ArcticMLP(config, config.intermediate_size)

    def forward(self, x_BSD: Tensor) -> Tensor:
        if not self.is_moe_layer:
            return self.mlp(x_BSD)
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        weights_TE = F.softmax(self.gate(x_TD), dim=1, dtype=torch.float)
        weights_TK, index_TK = torch.topk(weights_TE, self.top_k, dim=-1)
        if self.top_k > 1:
            weights_TK /= weights_TK.sum(dim=-1, keepdim=True)
        weights_TK = weights_TK.to(x_TD.dtype)
        out_TD = torch.zeros_like(x_TD)
        mask_EKT = F.one_hot(index_TK, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            expert = self.experts[expert_idx]
            k, t = torch.where(mask_EKT[expert_idx])
            if t.shape[0] == 0:
                continue
            out_TD.index_add_(0, t, expert(x_TD[t]) * weights_TK[t, k, None])
        return out_TD.view_as(x_BSD)


class ArcticDecoderLayer(nn.Module):
    def __init__(self, config: ArcticConfig, layer_idx: int) -> None:
        super().__init__()
        head_dim = config.hidden_size // config.num_attention_heads
        self.self_attn = Attention(config, layer_idx, scale=head_dim**-0.5)
        self.block_sparse_moe = ArcticMoE(config, layer_idx)
        self.input_layernorm = RMSNorm(config)
        self.post_attention_layernorm = RMSNorm(config)
        self.is_parallel = config.parallel_attn_mlp_res and self.block_sparse_moe.is_moe_layer
        if config.use_residual and self.is_parallel:
            self.residual_layernorm = RMSNorm(config)
            self.residual_mlp = ArcticMLP(config, config.hidden_size)

    def forward(self, x: Tensor, mask: Tensor, position_ids: Tensor, cache: Any) -> Tensor:
        attended = x + self.self_attn(self.input_layernorm(x), mask, position_ids, cache)
        if not self.is_parallel:
            return attended + self.block_sparse_moe(self.post_attention_layernorm(attended))
        residual = attended + self.residual_mlp(self.residual_layernorm(attended))
        return residual + self.block_sparse_moe(self.post_attention_layernorm(x))


class ArcticModel(Decoder):
    config_class = ArcticConfig
    layer_class = ArcticDecoderLayer


class ArcticForCausalLM(CausalLM):
    config_class = ArcticConfig
    decoder_class = ArcticModel
