"""Attention of new tokens to latents: the kernel against its reference, and that against attention
of expanded keys and values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_infinity.gpu.kernels import descriptions, reference
from moe_infinity.gpu.kernels.descriptions import CachedLayer
from tests.gpu.kernels.attention_case import DEVICE

pytest.importorskip("triton", reason="needs triton")
from moe_infinity.gpu.kernels import attention

pytestmark = [pytest.mark.triton]

CASES: dict[str, dict[str, Any]] = {
    "first token": {"num_tokens": 1},
    "two sequences, one padded": {"num_tokens": 70, "padding": (0, 66)},
    "more than one tile of heads": {"num_tokens": 33, "num_heads": 20},
    "odd widths": {"num_tokens": 40, "rank": 24, "width": 6},
    "two blocks of a latent": {"num_tokens": 20, "rank": 80},
    "all splits": {"num_tokens": 300, "padding": (3, 0, 299)},
}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def few_splits(monkeypatch):
    """Programs run one after the other. Some splits have no chunk, some two."""
    if DEVICE == "cpu":
        monkeypatch.setattr(descriptions, "MAX_SPLITS", 4)


class LatentCase:
    """Memory beyond the tokens, and the last one's, is not a number."""

    def __init__(
        self,
        *,
        num_tokens: int,
        dtype: torch.dtype = torch.float32,
        num_heads: int = 4,
        rank: int = 32,
        width: int = 16,
        padding: tuple[int, ...] = (),
        room: int = 5,
        offset: int = 0,
    ) -> None:
        make = torch.Generator().manual_seed(0)
        num_seqs = max(len(padding), 1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=make).to(dtype)

        self.given = (
            draw(num_seqs, num_heads, rank), draw(num_seqs, num_heads, width),
            draw(num_seqs, rank), draw(num_seqs, width),
        )  # fmt: skip
        self.rows = draw(num_seqs, num_tokens, rank), draw(num_seqs, num_tokens, width)
        self.num_tokens = num_tokens
        self.room = num_tokens + room
        self.offset = offset
        self.mask_BN = torch.ones(num_seqs, num_tokens, dtype=torch.uint8)
        for seq, count in enumerate(padding):
            self.mask_BN[seq, :count] = 0
        self.scale = 0.3

    def memory(self, rows_BNr: Tensor, last_Br: Tensor | None = None) -> Tensor:
        rows_BNr = rows_BNr.clone()
        rows_BNr[self.mask_BN == 0] = torch.nan
        rows_BNr[:, -1] = torch.nan if last_Br is None else last_Br
        padded = torch.nn.functional.pad(
            rows_BNr, (0, 0, 0, self.room - self.num_tokens), value=torch.nan
        )
        return torch.nn.functional.pad(padded.flatten(), (self.offset, 16), value=torch.nan)

    def compute(self, attend_latent: Any) -> Tensor:
        memories = [self.memory(rows).to(DEVICE) for rows in self.rows]
        rank, width = (rows.shape[2] for rows in self.rows)
        mask_BN = self.mask_BN.to(DEVICE)
        cached = CachedLayer(
            keys=memories[0][self.offset :].data_ptr(),
            values=memories[1][self.offset :].data_ptr(),
            key_seq=self.room * rank,
            key_head=self.room * rank,
            value_seq=self.room * width,
            value_head=self.room * width,
            num_tokens=self.num_tokens,
            mask=mask_BN.data_ptr(),
            mask_seq=self.num_tokens,
        )
        given = [tensor.to(DEVICE) for tensor in self.given]
        out: Tensor = attend_latent(*given, torch.tensor(cached, device=DEVICE), scale=self.scale)
        for memory, rows, last in zip(memories, self.rows, self.given[2:], strict=True):
            expected = self.memory(rows, last)
            assert torch.equal(memory.cpu().view(torch.uint8), expected.view(torch.uint8))
        return out.cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_it_is_its_reference_but_for_rounding(name, dtype):
    case = LatentCase(**CASES[name], dtype=dtype)
    found = case.compute(attention.attend_latent)
    expected = case.compute(reference.attend_latent)
    bound = 2e-6 if dtype is torch.float32 else 2**-6
    assert (found.float() - expected.float()).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("offset", [0, 8])
def test_bits_do_not_depend_on_the_buffers(offset):
    found = [
        LatentCase(num_tokens=70, offset=own, room=room).compute(attention.attend_latent)
        for own, room in ((0, 5), (offset, 90))
    ]
    assert torch.equal(*found)


def test_a_sequence_gets_the_same_bits_alone():
    case = LatentCase(num_tokens=70, padding=(0, 66, 3))
    found = case.compute(attention.attend_latent)
    for seq in range(3):
        one = slice(seq, seq + 1)
        alone = LatentCase(num_tokens=70)
        alone.given = tuple(tensor[one] for tensor in case.given)  # type: ignore[assignment]
        alone.rows = case.rows[0][one], case.rows[1][one]
        alone.mask_BN = case.mask_BN[one]
        assert torch.equal(alone.compute(attention.attend_latent)[0], found[seq])


def test_the_reference_is_attention_of_expanded_keys_and_values():
    """Queries are multiplied with what would expand keys, and sums with what would values."""
    case = LatentCase(num_tokens=20, num_heads=3)
    make = torch.Generator().manual_seed(1)
    keys_Hnr, values_Hvr = (torch.randn(3, 7, 32, generator=make) for _ in range(2))
    query_1Hn = torch.randn(1, 3, 7, generator=make)
    _, rotated_1Hp, latent_1r, key_1p = case.given
    query_1Hr = torch.einsum("bhn,hnr->bhr", query_1Hn, keys_Hnr)
    case.given = query_1Hr, rotated_1Hp, latent_1r, key_1p
    sum_1Hr = case.compute(reference.attend_latent)
    found = torch.einsum("bhr,hvr->bhv", sum_1Hr, values_Hvr)
    latents_Nr = torch.cat([case.rows[0][0, :-1], latent_1r])
    rotated_Np = torch.cat([case.rows[1][0, :-1], key_1p])
    key_HNn = torch.einsum("nr,hkr->hnk", latents_Nr, keys_Hnr)
    key_HNd = torch.cat([key_HNn, rotated_Np.expand(3, -1, -1)], dim=-1)
    value_HNv = torch.einsum("nr,hvr->hnv", latents_Nr, values_Hvr)
    query_1Hd = torch.cat([query_1Hn, rotated_1Hp], dim=-1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query_1Hd[0, :, None], key_HNd, value_HNv, scale=case.scale
    )
    torch.testing.assert_close(found[0], expected[:, 0], rtol=1e-4, atol=1e-5)
