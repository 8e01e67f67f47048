"""The reference of attention.py, in plain PyTorch, from addresses in host memory.

Legend: B sequences, G heads of the cache, H of queries, N tokens, d columns of a key, v of a value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_infinity.experimental.gpu.kernels.cached_layer import CachedLayer
from moe_infinity.experimental.gpu.kernels.reference import memory_at


def attend(
    query_BHd: Tensor,
    key_BGd: Tensor,
    value_BGv: Tensor,
    cached: Tensor,
    sinks_H: Tensor | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """See experimental/gpu/kernels/attention.py."""
    layer = CachedLayer(*cached.tolist())
    keys_BGNd = _rows(layer.keys, layer.key_seq, layer.key_head, layer.num_tokens, key_BGd)
    values_BGNv = _rows(
        layer.values, layer.value_seq, layer.value_head, layer.num_tokens, value_BGv
    )
    keys_BGNd[:, :, -1] = key_BGd
    values_BGNv[:, :, -1] = value_BGv
    is_seen_BN = _seen(layer, len(query_BHd), window)

    num_seqs, num_heads, _ = query_BHd.shape
    num_groups = key_BGd.shape[1]
    query_BGPd = query_BHd.float().unflatten(1, (num_groups, -1))
    score_BGPN = query_BGPd @ keys_BGNd.float().mT * scale
    if softcap is not None:
        score_BGPN = softcap * torch.tanh(score_BGPN / softcap)
    score_BGPN = score_BGPN.masked_fill(~is_seen_BN[:, None, None], -torch.inf)
    if sinks_H is not None:
        sink_GP = sinks_H.float().unflatten(0, (num_groups, -1))
        sink_BGP1 = sink_GP.expand(num_seqs, -1, -1)[..., None]
        score_BGPN = torch.cat((score_BGPN, sink_BGP1), -1)
    weight_BGPN: Tensor = score_BGPN.softmax(-1)[..., : layer.num_tokens]
    # What is not looked at may be anything.
    seen_BGNv = values_BGNv.float().masked_fill(~is_seen_BN[:, None, :, None], 0.0)
    out_BGPv: Tensor = weight_BGPN @ seen_BGNv
    return out_BGPv.reshape(num_seqs, num_heads, -1).to(query_BHd.dtype)


def _rows(address: int, seq: int, head: int, num_tokens: int, new_BGd: Tensor) -> Tensor:
    """[B, G, N, d] of the cache, in its memory."""
    num_seqs, num_groups, width = new_BGd.shape
    size = (num_seqs - 1) * seq + (num_groups - 1) * head + num_tokens * width
    memory = memory_at(address, size * new_BGd.element_size()).view(new_BGd.dtype)
    return memory.as_strided((num_seqs, num_groups, num_tokens, width), (seq, head, width, 1))


def _seen(layer: CachedLayer, num_seqs: int, window: int | None) -> Tensor:
    """bool [B, N]"""
    shape = num_seqs, layer.num_tokens
    seen_BN = torch.ones(shape, dtype=torch.bool, device="cpu")
    if layer.mask:
        size = (num_seqs - 1) * layer.mask_seq + layer.num_tokens
        seen_BN &= memory_at(layer.mask, size).as_strided(shape, (layer.mask_seq, 1)) != 0
    seen_BN[:, -1] = True
    if window is not None:
        seen_BN[:, : max(0, layer.num_tokens - window)] = False
    return seen_BN


def attend_latent(
    query_BHr: Tensor,
    rotated_BHp: Tensor,
    latent_Br: Tensor,
    key_Bp: Tensor,
    expand_Hvr: Tensor,
    cached: Tensor,
    *,
    scale: float,
) -> Tensor:
    """See latent_attention.py. r columns of a latent, p of a rotated key."""
    layer = CachedLayer(*cached.tolist())
    given = layer.num_tokens, latent_Br[:, None]
    latents_BNr = _rows(layer.keys, layer.key_seq, layer.key_head, *given)[:, 0]
    given = layer.num_tokens, key_Bp[:, None]
    keys_BNp = _rows(layer.values, layer.value_seq, layer.value_head, *given)[:, 0]
    latents_BNr[:, -1] = latent_Br
    keys_BNp[:, -1] = key_Bp
    is_seen_BN = _seen(layer, len(query_BHr), None)
    score_BHN = query_BHr.float() @ latents_BNr.float().mT
    score_BHN = (score_BHN + rotated_BHp.float() @ keys_BNp.float().mT) * scale
    weight_BHN = score_BHN.masked_fill(~is_seen_BN[:, None], -torch.inf).softmax(-1)
    # What is not looked at may be anything.
    seen_BNr = latents_BNr.float().masked_fill(~is_seen_BN[:, :, None], 0.0)
    out_BHr = (weight_BHN @ seen_BNr).to(query_BHr.dtype)
    return torch.einsum("bhr,hvr->bhv", out_BHr.float(), expand_Hvr.float()).to(query_BHr.dtype)
