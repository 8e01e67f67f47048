"""Experts that stay in memory, so that kernels may compute them at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from moe_infinity.experts import Ints

if TYPE_CHECKING:
    from moe_infinity.kernels.cpu.experts import FusedExperts


class Residents(NamedTuple):
    """The experts of one layer, all in memory, where they stay."""

    experts: FusedExperts
    tables_E: Ints  # int64: the address of a table with the addresses of each one's parts
