"""What the remote-code models of the tests share: norm, attention, the way from ids to logits.

Copied into a checkpoint folder beside the model that imports it, as published remote code lies in
several files. It knows nothing of this project.
Legend: B sequences, S new tokens, K cached and new tokens, N heads, D model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeCausalLMOutputWithPast


class RMSNorm(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


def rotate(x_BNSH: Tensor, position_ids_BS: Tensor, theta: float) -> Tensor:
    """Rotary position embedding; computed anew, so that no buffer has to survive loading."""
    half = x_BNSH.shape[-1] // 2
    frequency = theta ** -(torch.arange(half, device=x_BNSH.device) / half)
    angle = position_ids_BS[:, None, :, None].float() * frequency
    cos, sin = angle.cos().to(x_BNSH.dtype), angle.sin().to(x_BNSH.dtype)
    first, second = x_BNSH[..., :half], x_BNSH[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Grouped-query attention written out; `max_score` caps the scores softly, as Grok does."""

    def __init__(
        self, config: Any, layer_idx: int, *, scale: float, max_score: float | None = None
    ) -> None:
        super().__init__()
        self.layer_idx, self.scale, self.max_score = layer_idx, scale, max_score
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.rope_theta = config.rope_theta
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, mask: Tensor, position_ids: Tensor, cache: Any) -> Tensor:
        num_sequences, num_new, _ = x.shape
        q, k, v = (
            projection(x).view(num_sequences, num_new, -1, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = rotate(q, position_ids, self.rope_theta)
        k = rotate(k, position_ids, self.rope_theta)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        scores = (q @ k.transpose(2, 3)).float() * self.scale
        if self.max_score is not None:
            scores = self.max_score * torch.tanh(scores / self.max_score)
        out = torch.softmax(scores + mask, dim=-1).to(x.dtype) @ v
        return self.o_proj(out.transpose(1, 2).reshape(num_sequences, num_new, -1))


def causal_mask(attention_mask: Tensor | None, num_new: int, num_all: int) -> Tensor:
    """[B or 1, 1, S, K], 0 where a token may look, very negative where not: never a row of NaN."""
    allowed = torch.ones(num_new, num_all, dtype=torch.bool).tril(num_all - num_new)[None, None]
    if attention_mask is not None:
        allowed = allowed & attention_mask[:, None, None, :num_all].bool()
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


class PreTrained(PreTrainedModel):  # type: ignore[misc]
    base_model_prefix = "model"
    _no_split_modules: list[str] = []


class Decoder(PreTrained):
    """Embeddings, layers, norm. A model says with `layer_class` what its layers are."""

    layer_class: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            self.layer_class(config, layer_idx) for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config)
        self.post_init()

    def embed(self, input_ids: Tensor) -> Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        num_cached = past_key_values.get_seq_length() if past_key_values is not None else 0
        num_new = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(num_cached, num_cached + num_new)[None]
        mask = causal_mask(attention_mask, num_new, num_cached + num_new)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, mask, position_ids, past_key_values)
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(x), past_key_values=past_key_values
        )


class CausalLM(PreTrained, GenerationMixin):  # type: ignore[misc]
    """A `Decoder` with a head. A model says with `decoder_class` what is below."""

    decoder_class: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.decoder_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        out = self.model(input_ids, attention_mask, position_ids, past_key_values, use_cache)
        return MoeCausalLMOutputWithPast(
            logits=self.lm_head(out.last_hidden_state).float(),
            past_key_values=out.past_key_values,
        )
