"""Cosines, sines and masks of a step, as kernels want them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Angles:
    """The layers of a step are given the same, so each is made once."""

    def __init__(self, num_pairs: int) -> None:
        self._num_pairs = num_pairs
        self._given: Any = None
        self._angles: tuple[Tensor, Tensor]
        self._mask: Tensor | None = None
        self._numbers: Tensor | None = None

    def of(
        self, given: tuple[Tensor, Tensor] | Tensor, num_tokens: int = 1
    ) -> tuple[Tensor, Tensor]:
        """[B or 1, N, ...], or complex numbers -> float32 [tokens or 1, pairs]."""
        if given is not self._given:
            parts = (given.real, given.imag) if isinstance(given, Tensor) else given
            cos, sin = (self._rows(angle, num_tokens) for angle in parts)
            self._angles = cos, sin
            self._given = given
        return self._angles

    def _rows(self, angle: Tensor, num_tokens: int) -> Tensor:
        rows = angle[..., : self._num_pairs].to(torch.float32).flatten(0, 1).contiguous()
        is_of_all = len(rows) in (1, num_tokens) or num_tokens == 1
        return rows if is_of_all else rows.repeat(num_tokens // len(rows), 1)

    def mask_of(self, mask: Tensor | None, num_tokens: int) -> Tensor | None:
        """[B, 1, 1, N], added or True where to look -> float32 [B, N]."""
        if mask is None:
            return None
        if mask is not self._mask:
            numbers = mask.view(len(mask), num_tokens)
            if numbers.dtype == torch.bool:
                numbers = torch.zeros_like(numbers, dtype=torch.float32).masked_fill_(
                    ~numbers, -torch.inf
                )
            self._numbers = numbers.to(torch.float32).contiguous()
            self._mask = mask
        return self._numbers
