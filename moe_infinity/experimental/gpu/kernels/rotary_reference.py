"""The reference of rotary.py, in plain PyTorch.

Legend: B tokens, H heads, d columns of a head, R pairs of columns that are rotated together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_infinity.experimental.gpu.kernels.heads import HALVES, NEIGHBOURS, Heads
from moe_infinity.experimental.gpu.kernels.norms_reference import plain_rms_norm


def make_heads(
    query_BC: Tensor,
    key_BC: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    cos_BR: Tensor,
    sin_BR: Tensor,
    heads: Heads,
) -> tuple[Tensor, Tensor]:
    """See experimental/gpu/kernels/rotary.py."""
    angles = cos_BR[:, None], sin_BR[:, None]
    widths = heads.query_width, heads.key_width
    firsts = heads.first_rotated, heads.first_rotated_key
    normed = heads.query_width, heads.normed_key or heads.key_width
    made = []
    for x_BC, count, width, first, stop, norm, eps in zip(
        (query_BC, key_BC),
        (heads.num_heads, heads.num_groups),
        widths,
        firsts,
        normed,
        (query_norm, key_norm),
        (heads.query_eps, heads.key_eps),
        strict=True,
    ):
        x = x_BC[:, : count * width]
        if heads.norm_form is not None and norm is not None:
            rows = x if heads.norms_all else x.unflatten(1, (count, width))[..., :stop]
            out = plain_rms_norm(rows, norm, eps, heads.norm_form)
            if stop < width:
                out = torch.cat([out, x.unflatten(1, (count, width))[..., stop:]], -1)
            x = out.flatten(1)
        made.append(_rotated(x.unflatten(1, (count, width)), *angles, first, heads))
    return made[0], made[1]


def _rotated(x_BHd: Tensor, cos: Tensor, sin: Tensor, first: int, heads: Heads) -> Tensor:
    stop = first + heads.rotated
    part = x_BHd[..., first:stop].float()
    parts = (
        part.chunk(2, dim=-1) if heads.pairs == HALVES else part.unflatten(-1, (-1, 2)).unbind(-1)
    )
    one, other = parts
    results = one * cos - other * sin, other * cos + one * sin
    turned = (
        torch.stack(results, -1).flatten(-2)
        if heads.pairs == NEIGHBOURS
        else torch.cat(results, -1)
    )
    out = x_BHd.clone()
    out[..., first:stop] = turned.to(x_BHd.dtype)
    return out
