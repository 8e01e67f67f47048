"""The result of each kernel of this folder in plain PyTorch and Python: the definition that it is
tested against, and what a device in host memory runs. Addresses are read as they are.

Legend: L MoE layers, T tokens, B sequences, E experts of a layer, K experts of a token, G groups of
M experts or heads of the cache, H heads of queries, N cached tokens, D model width, F expert width,
d columns of a key or a head, v of a value, r of a latent, p of a rotated key, C columns of a row,
R pairs of columns that are rotated together.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_infinity.gpu.device_table import ABSENT, FREE, NOTHING, DeviceTable
from moe_infinity.gpu.kernels.descriptions import (
    GROUP_SCORES,
    HALVES,
    NEIGHBOURS,
    TINY,
    CachedLayer,
    ExpertChoice,
    Heads,
)
from moe_infinity.kernels.reference import Activation
from moe_infinity.kernels.triton.reference import memory_at

# resolve.py


def resolve(table: DeviceTable, moe_layer_idx: int, top_k_index_TK: Tensor) -> Tensor:
    """Find the experts that pairs use, and slots for those that are missed."""
    index_P = top_k_index_TK.flatten().cpu()
    used = sorted(set(index_P[index_P >= 0].tolist()))
    report_W = table.reports_LW[moe_layer_idx]
    report_W[: table.num_experts] = NOTHING
    report_W[table.num_experts :][: len(index_P)] = index_P
    table.uses_E[:] = torch.bincount(index_P[index_P >= 0], minlength=table.num_experts)
    table.pointers_E.zero_()
    table.copies_2E.zero_()
    num_missed = 0
    for expert in used:
        slot = int(table.slot_LE[moe_layer_idx, expert])
        host = int(table.host_LE[moe_layer_idx, expert])
        if slot < 0:
            slot = _take_slot(table, moe_layer_idx, expert)
            report_W[expert] = slot
            if slot >= 0:
                copy = torch.tensor(
                    [host, int(table.address_S[slot])], dtype=torch.int64, device="cpu"
                )
                table.copies_2E[:, num_missed] = copy
            num_missed += 1
        table.pointers_E[expert] = table.address_S[slot] if slot >= 0 else host
    return table.pointers_E


def _take_slot(table: DeviceTable, moe_layer_idx: int, expert: int) -> int:
    """A free one, or that of the lowest-scored resident that may leave; else ABSENT."""
    part = table.part_of(moe_layer_idx)
    candidates = []
    for slot, owner in enumerate(table.owner_S.tolist()):
        row, resident = divmod(owner, table.num_experts)
        if owner == FREE:
            candidates.append((-math.inf, slot))
        elif row == moe_layer_idx and table.uses_E[resident]:
            continue
        elif not moe_layer_idx < row <= table.last_layers[part]:
            score = float(table.scores_LHE[row, part, resident])
            candidates += [(score, slot)] if score < math.inf else []
    if not candidates:
        return ABSENT
    _, slot = min(candidates)
    if table.owner_S[slot] != FREE:
        table.slot_LE.view(-1)[table.owner_S[slot]] = ABSENT
    table.slot_LE[moe_layer_idx, expert] = slot
    table.owner_S[slot] = moe_layer_idx * table.num_experts + expert
    return slot


def fill(table: DeviceTable, num_pairs: int) -> None:
    """Copy the experts that took a slot in the last resolve()."""
    slot_bytes = table.slots_SB.shape[1]
    for source, destination in table.copies_2E.T[:num_pairs].tolist():
        if source:
            memory_at(destination, slot_bytes).copy_(memory_at(source, slot_bytes))


# attention.py


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
    """Return [B, H, v]: attention of a new token of each sequence to the cached ones."""
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
    cached: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Return [B, H, r]: attention to latents, which are keys and values at once."""
    layer = CachedLayer(*cached.tolist())
    new_latent = layer.num_tokens, latent_Br[:, None]
    latents_BNr = _rows(layer.keys, layer.key_seq, layer.key_head, *new_latent)[:, 0]
    new_key = layer.num_tokens, key_Bp[:, None]
    keys_BNp = _rows(layer.values, layer.value_seq, layer.value_head, *new_key)[:, 0]
    latents_BNr[:, -1] = latent_Br
    keys_BNp[:, -1] = key_Bp
    is_seen_BN = _seen(layer, len(query_BHr), None)
    score_BHN = query_BHr.float() @ latents_BNr.float().mT
    score_BHN = (score_BHN + rotated_BHp.float() @ keys_BNp.float().mT) * scale
    weight_BHN = score_BHN.masked_fill(~is_seen_BN[:, None], -torch.inf).softmax(-1)
    # What is not looked at may be anything.
    seen_BNr = latents_BNr.float().masked_fill(~is_seen_BN[:, :, None], 0.0)
    return (weight_BHN @ seen_BNr).to(query_BHr.dtype)


# rows.py


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, form: str) -> Tensor:
    """Return the RMSNorm of rows, as classes of transformers compute it: Qwen3MoeRMSNorm,
    GptOssRMSNorm and Qwen3NextRMSNorm.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form == "rounded twice":
        return weight_D * normed.to(x.dtype)
    weight = weight_D.float() + 1.0 if form == "plus one" else weight_D.float()
    return (normed * weight).to(x.dtype)


def add_rms_norm(
    x: Tensor, added: tuple[Tensor, ...], weight_D: Tensor, eps: float, form: str
) -> tuple[Tensor, Tensor]:
    """Return the sum of x and the sum of the others, and its norm. Every sum is rounded."""
    total = x + sum(added[1:], added[0])
    return total, rms_norm(total, weight_D, eps, form)


def gated(gate_up_TC: Tensor, activation: Activation) -> Tensor:
    """Return [T, F]: what an MLP computes between its products."""
    gate_TF, up_TF = gate_up_TC.float().chunk(2, -1)
    return activation(gate_TF, up_TF).to(gate_up_TC.dtype)


def make_heads(
    query_BC: Tensor,
    key_BC: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos_BR: Tensor,
    sin_BR: Tensor,
    heads: Heads,
) -> tuple[Tensor, Tensor]:
    """Return queries [B, H, d] and keys [B, G, d], with norms and rotary positions."""
    query_BHd = query_BC[:, : heads.num_heads * heads.query_width].unflatten(
        1, (heads.num_heads, heads.query_width)
    )
    key_BGd = key_BC[:, : heads.num_groups * heads.key_width].unflatten(
        1, (heads.num_groups, heads.key_width)
    )
    normed_key = heads.normed_key or heads.key_width
    query_BHd = _normed(query_BHd, query_norm, heads.query_width, heads.query_eps, heads)
    key_BGd = _normed(key_BGd, key_norm, normed_key, heads.key_eps, heads)
    return (
        _rotated(query_BHd, cos_BR, sin_BR, heads.first_rotated, heads),
        _rotated(key_BGd, cos_BR, sin_BR, heads.first_rotated_key, heads),
    )


def _normed(
    x_BHd: Tensor, weight: Tensor | None, num_columns: int, eps: float, heads: Heads
) -> Tensor:
    """The first columns of each head have a norm, or all heads together."""
    if heads.norm_form is None or weight is None:
        return x_BHd
    if heads.norms_all:
        return rms_norm(x_BHd.flatten(1), weight, eps, heads.norm_form).view(x_BHd.shape)
    first = rms_norm(x_BHd[..., :num_columns], weight, eps, heads.norm_form)
    return torch.cat([first, x_BHd[..., num_columns:]], -1)


def _rotated(x_BHd: Tensor, cos_BR: Tensor, sin_BR: Tensor, first: int, heads: Heads) -> Tensor:
    stop = first + heads.rotated
    columns = x_BHd[..., first:stop].float()
    if heads.pairs == HALVES:
        one, other = columns.chunk(2, dim=-1)
    else:
        one, other = columns.unflatten(-1, (-1, 2)).unbind(-1)
    cos = cos_BR[:, None]
    sin = sin_BR[:, None]
    turned = one * cos - other * sin, other * cos + one * sin
    out = x_BHd.clone()
    joined = (
        torch.stack(turned, -1).flatten(-2) if heads.pairs == NEIGHBOURS else torch.cat(turned, -1)
    )
    out[..., first:stop] = joined.to(x_BHd.dtype)
    return out


# experts.py


def choose(
    logits_TE: Tensor, correction_E: Tensor | None, choice: ExpertChoice
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 [T, K], and their weights, [T, K].

    The largest is first, of equal ones the one with the lower index. NaN is larger than anything.
    """
    num_experts = logits_TE.shape[1]
    assert choice.fits(num_experts), (choice, num_experts)
    scores_TE = _scores(logits_TE.float(), choice)
    ranked_TE = scores_TE if correction_E is None else scores_TE + correction_E.float()
    order_TE = _descending(ranked_TE)
    if choice.num_groups > 1:
        is_kept_TE = _is_kept(ranked_TE, choice)
        kept_first_TE = _descending(is_kept_TE.gather(1, order_TE).byte())
        order_TE = order_TE.gather(1, kept_first_TE)
    index_TK = order_TE[:, : choice.top_k].contiguous()
    weights_TK = scores_TE.gather(1, index_TK)
    if choice.weights == "softmax":
        weights_TK = weights_TK.softmax(1)
    elif choice.weights == "divided by their sum":
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + TINY)
    return index_TK, (weights_TK * choice.factor).to(choice.dtype)


def _scores(logits_TE: Tensor, choice: ExpertChoice) -> Tensor:
    if choice.scores == "softmax":
        return logits_TE.softmax(1)
    return logits_TE.sigmoid() if choice.scores == "sigmoid" else logits_TE


def _is_kept(ranked_TE: Tensor, choice: ExpertChoice) -> Tensor:
    """[T, E]: whether an expert is of a kept group."""
    ranked_TGM = ranked_TE.unflatten(1, (choice.num_groups, -1))
    num_best = 1 + GROUP_SCORES.index(choice.group_score)
    groups_TG = ranked_TGM.topk(num_best, dim=2).values.sum(2)
    kept_TG = torch.zeros_like(groups_TG, dtype=torch.bool)
    kept_TG.scatter_(1, _descending(groups_TG)[:, : choice.kept_groups], True)
    return kept_TG[:, :, None].expand_as(ranked_TGM).flatten(1)


def _descending(values: Tensor) -> Tensor:
    return values.sort(dim=1, descending=True, stable=True).indices
