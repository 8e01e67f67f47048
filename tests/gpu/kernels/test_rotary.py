"""Queries and keys of tokens: the kernel against its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_infinity.gpu.kernels import reference
from moe_infinity.gpu.kernels.descriptions import FORMS, PAIRS, Heads

pytest.importorskip("triton", reason="needs triton")
from moe_infinity.gpu.kernels import rows

pytestmark = [pytest.mark.triton]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
USUAL = Heads(
    num_heads=4, num_groups=2, query_width=16, key_width=16, rotated=16, first_rotated=0,
    first_rotated_key=0, pairs="halves",
)  # fmt: skip
NORMED = USUAL._replace(norm_form="rounded twice", query_eps=1e-5, key_eps=1e-3)
CASES = {
    **{pairs: USUAL._replace(pairs=pairs) for pairs in PAIRS},
    "a part of a head": USUAL._replace(rotated=8),
    "odd widths": USUAL._replace(query_width=24, key_width=24, rotated=20, pairs="neighbours"),
    "latent": USUAL._replace(
        query_width=24, num_groups=1, key_width=8, rotated=8, first_rotated=16, pairs=PAIRS[2]
    ),
    **{form: NORMED._replace(norm_form=form) for form in FORMS},
    "norm of all heads": NORMED._replace(norms_all=True),
    "norm of a latent": NORMED._replace(
        query_width=24,
        num_groups=1,
        key_width=28,
        rotated=8,
        first_rotated=16,
        first_rotated_key=20,
        normed_key=20,
    ),
}


def given(heads: Heads, dtype: torch.dtype, num_seqs: int, num_angles: int) -> Any:
    make = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make)

    queries, keys = heads.num_heads * heads.query_width, heads.num_groups * heads.key_width
    columns_BC = draw(num_seqs, queries + keys + 12).to(dtype).to(DEVICE)
    norms: list[Tensor | None] = [None, None]
    if heads.norm_form is not None:
        wide = (queries, keys) if heads.norms_all else (heads.query_width, heads.key_width)
        norms = [draw(width).to(dtype).to(DEVICE) for width in wide]
        if heads.normed_key:
            norms = [None, draw(heads.normed_key).to(dtype).to(DEVICE)]
    angle = draw(num_angles, heads.rotated // 2).to(DEVICE)
    return [columns_BC, columns_BC[:, queries:], *norms, angle.cos(), angle.sin(), heads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("num_seqs", "num_angles"), [(1, 1), (3, 1), (3, 3)])
def test_the_kernel_is_its_reference_but_for_rounding(name, dtype, num_seqs, num_angles):
    case = given(CASES[name], dtype, num_seqs, num_angles)
    found = rows.make_heads(*case)
    on_host: Any = [x.cpu() if isinstance(x, Tensor) else x for x in case]
    expected = reference.make_heads(*on_host)
    bound = 2e-6 if dtype is torch.float32 else 2**-5  # the interpreter cuts off
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert one.dtype == dtype
        assert (one.cpu().float() - other.float()).abs().max() <= bound * other.abs().max()


def test_every_setting_counts():
    heads = CASES["rounded once"]
    case = given(heads, torch.float32, 2, 2)
    *rows, _, _, _ = case
    found, _ = reference.make_heads(*case)
    changes: list[dict[str, Any]] = [
        {"pairs": "neighbours"}, {"rotated": 8}, {"query_eps": 0.1}, {"norm_form": "plus one"},
    ]  # fmt: skip
    for change in changes:
        angles = [angle[:, : change.get("rotated", 16) // 2] for angle in case[4:6]]
        changed: Any = [*rows, *angles, heads._replace(**change)]
        other, _ = reference.make_heads(*changed)
        assert (found - other).abs().max() > 1e-2, change


def test_positions_are_rotated_as_transformers_does():
    """Source: apply_rotary_pos_emb of Llama, and of DeepSeek-V3 where pairs are neighbours."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    of_stock = {PAIRS[0]: apply_rotary_pos_emb, PAIRS[2]: apply_rotary_pos_emb_interleave}
    for pairs, rotate in of_stock.items():
        heads = USUAL._replace(pairs=pairs)
        case = given(heads, torch.float32, 3, 3)
        made = reference.make_heads(*case)
        columns_BC = case[0]
        query = columns_BC[:, :64].view(3, 4, 1, 16)
        key = columns_BC[:, 64:96].view(3, 2, 1, 16)
        cos, sin = (torch.cat([angle, angle], -1)[:, None] for angle in case[4:6])
        for one, other in zip(made, rotate(query, key, cos, sin), strict=True):
            torch.testing.assert_close(one, other[:, :, 0])
