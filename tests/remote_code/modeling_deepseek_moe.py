"""The block structure of DeepSeek-MoE-16B's remote code, written from its published configuration
and tensor names: dense first layers, then routed experts beside shared ones.

At inference the token-expert pairs are sorted by expert, each expert's rows lie side by side, an
expert without rows is not called, its output is scaled in place and scattered back in that order.
Not of DeepSeek: `num_rounds` above 1 feeds the experts with what they gave, like chained experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig

from .modeling_base import Attention, CausalLM, Decoder, RMSNorm


class DeepseekConfig(PretrainedConfig):  # type: ignore[misc]
    model_type = "deepseek"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 128,
        hidden_size: int = 64,
        intermediate_size: int = 96,
        moe_intermediate_size: int = 40,
        num_hidden_layers: int = 3,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 4,
        n_routed_experts: int = 8,
        n_shared_experts: int = 2,
        num_experts_per_tok: int = 3,
        first_k_dense_replace: int = 1,
        moe_layer_freq: int = 1,
        norm_topk_prob: bool = False,
        num_rounds: int = 1,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 10000.0,
        max_position_embeddings: int = 256,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.moe_intermediate_size = moe_intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.n_routed_experts = n_routed_experts
        self.n_shared_experts = n_shared_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.first_k_dense_replace = first_k_dense_replace
        self.moe_layer_freq = moe_layer_freq
        self.norm_topk_prob = norm_topk_prob
        self.num_rounds = num_rounds
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class DeepseekMLP(nn.Module):
    def __init__(self, config: DeepseekConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MoEGate(nn.Module):
    """The router's weight is a bare parameter here, not a linear layer."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        scores_TE = F.linear(x_TD, self.weight).softmax(dim=-1)
        weights_TK, index_TK = torch.topk(scores_TE, k=self.top_k, dim=-1, sorted=False)
        if self.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return index_TK, weights_TK


class DeepseekMoE(nn.Module):
    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.top_k, self.num_rounds = config.num_experts_per_tok, config.num_rounds
        self.experts = nn.ModuleList(
            DeepseekMLP(config, config.moe_intermediate_size)
            for _ in range(config.n_routed_experts)
        )
        self.gate = MoEGate(config)
        self.shared_experts = DeepseekMLP(
            config, config.moe_intermediate_size * config.n_shared_experts
        )

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        routed_TD = torch.zeros_like(x_TD)
        for _ in range(self.num_rounds):
            fed_TD = x_TD + routed_TD
            index_TK, weights_TK = self.gate(fed_TD)
            routed_TD += self.moe_infer(fed_TD, index_TK.flatten(), weights_TK.reshape(-1, 1))
        return routed_TD.view_as(x_BSD) + self.shared_experts(x_BSD)

    @torch.no_grad()
    def moe_infer(self, x_TD: Tensor, expert_of_pair: Tensor, weight_of_pair: Tensor) -> Tensor:
        out_TD = torch.zeros_like(x_TD)
        pairs = expert_of_pair.argsort()
        ends = expert_of_pair.bincount().cumsum(0).tolist()
        tokens = pairs // self.top_k
        for expert_idx, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if start == end:
                continue
            t = tokens[start:end]
            rows = self.experts[expert_idx](x_TD[t])
            rows.mul_(weight_of_pair[pairs[start:end]])
            index = t.view(-1, 1).expand(-1, x_TD.shape[-1])
            out_TD.scatter_reduce_(0, index, rows, reduce="sum")
        return out_TD


class DeepseekDecoderLayer(nn.Module):
    def __init__(self, config: DeepseekConfig, layer_idx: int) -> None:
        super().__init__()
        head_dim = config.hidden_size // config.num_attention_heads
        self.self_attn = Attention(config, layer_idx, scale=head_dim**-0.5)
        is_sparse = (
            layer_idx >= config.first_k_dense_replace and layer_idx % config.moe_layer_freq == 0
        )
        self.mlp = (
            DeepseekMoE(config) if is_sparse else DeepseekMLP(config, config.intermediate_size)
        )
        self.input_layernorm = RMSNorm(config)
        self.post_attention_layernorm = RMSNorm(config)

    def forward(self, x: Tensor, mask: Tensor, position_ids: Tensor, cache: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), mask, position_ids, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class DeepseekModel(Decoder):
    config_class = DeepseekConfig
    layer_class = DeepseekDecoderLayer


class DeepseekForCausalLM(CausalLM):
    config_class = DeepseekConfig
    decoder_class = DeepseekModel
