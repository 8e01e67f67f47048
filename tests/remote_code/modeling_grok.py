"""The block structure of Grok-1, written from its published configuration and tensor names: four
norms per layer, capped attention scores, scaled embeddings and logits.

    h   = x + post_attn_norm(attention(pre_attn_norm(x)))
    out = h + post_moe_norm(moe(pre_moe_norm(h)))

Softmax over all experts, then top-k, not renormalised. The loop calls every expert, those without
tokens with no rows. Not of Grok-1: `experts_container` "dict" keeps the experts in an
nn.ModuleDict, and `expert_dropout` shows an expert that was left in training mode.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from .modeling_base import Attention, CausalLM, Decoder, RMSNorm


class Grok1Config(PretrainedConfig):  # type: ignore[misc]
    model_type = "grok-1"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 128,
        hidden_size: int = 64,
        intermediate_size: int = 48,
        num_hidden_layers: int = 3,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        num_experts: int = 8,
        num_experts_per_tok: int = 2,
        experts_container: str = "list",
        expert_dropout: float = 0.1,
        attn_output_multiplier: float = 0.25,
        max_attn_value: float = 30.0,
        embedding_multiplier_scale: float = 2.0,
        output_multiplier_scale: float = 0.5773502691896257,
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
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.experts_container = experts_container
        self.expert_dropout = expert_dropout
        self.attn_output_multiplier = attn_output_multiplier
        self.max_attn_value = max_attn_value
        self.embedding_multiplier_scale = embedding_multiplier_scale
        self.output_multiplier_scale = output_multiplier_scale
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class MoeMLP(nn.Module):
    def __init__(self, config: Grok1Config) -> None:
        super().__init__()
        self.linear_v = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.linear_1 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.linear = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.act_fn = nn.GELU()
        self.dropout = nn.Dropout(config.expert_dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear_1(self.act_fn(self.linear(x)) * self.linear_v(x)))


class MoeBlock(nn.Module):
    def __init__(self, config: Grok1Config) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, self.num_experts, bias=False)
        experts = [MoeMLP(config) for _ in range(self.num_experts)]
        self.experts: nn.Module
        if config.experts_container == "dict":
            self.experts = nn.ModuleDict({f"expert_{i}": e for i, e in enumerate(experts)})
        else:
            self.experts = nn.ModuleList(experts)

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        weights_TE = F.softmax(self.gate(x_TD), dim=1, dtype=torch.float)
        weights_TK, index_TK = torch.topk(weights_TE, self.top_k, dim=-1)
        weights_TK = weights_TK.to(x_TD.dtype)
        out_TD = torch.zeros_like(x_TD)
        mask_EKT = F.one_hot(index_TK, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx, expert in enumerate(self.experts.children()):
            k, t = torch.where(mask_EKT[expert_idx])
            rows = x_TD[None, t].reshape(-1, x_TD.shape[-1])
            out_TD.index_add_(0, t, expert(rows) * weights_TK[t, k, None])
        return out_TD.view_as(x_BSD)


class Grok1DecoderLayer(nn.Module):
    def __init__(self, config: Grok1Config, layer_idx: int) -> None:
        super().__init__()
        self.attn = Attention(
            config,
            layer_idx,
            scale=config.attn_output_multiplier,
            max_score=config.max_attn_value,
        )
        self.moe_block = MoeBlock(config)
        self.pre_attn_norm = RMSNorm(config)
        self.post_attn_norm = RMSNorm(config)
        self.pre_moe_norm = RMSNorm(config)
        self.post_moe_norm = RMSNorm(config)

    def forward(self, x: Tensor, mask: Tensor, position_ids: Tensor, cache: Any) -> Tensor:
        attended = self.attn(self.pre_attn_norm(x), mask, position_ids, cache)
        x = x + self.post_attn_norm(attended)
        return x + self.post_moe_norm(self.moe_block(self.pre_moe_norm(x)))


class Grok1Model(Decoder):
    config_class = Grok1Config
    layer_class = Grok1DecoderLayer

    def embed(self, input_ids: Tensor) -> Tensor:
        return super().embed(input_ids) * self.config.embedding_multiplier_scale


class Grok1ForCausalLM(CausalLM):
    config_class = Grok1Config
    decoder_class = Grok1Model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * self.config.output_multiplier_scale
        return out
