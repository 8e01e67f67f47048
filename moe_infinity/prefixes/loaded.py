"""The part of a model that it takes to compute and keep the beginning of a prompt."""

from __future__ import annotations

from typing import Any, Protocol

from moe_infinity.config import OffloadConfig
from moe_infinity.engine.engine import LocalExperts
from moe_infinity.experts import Ints, Step


class Loaded(Protocol):
    """A model with its experts, as `MoE` is one."""

    checkpoint: str
    model: Any

    @property
    def config(self) -> OffloadConfig:
        """The options with which it was opened."""

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer."""

    @property
    def engine(self) -> LocalExperts:
        """The experts of this process."""

    def forward(self, step: Step, *, cache: Any = None, **inputs: Any) -> Any:
        """Run one forward pass."""

    def note_known(self, step: Step, top_k_index_TLK: Ints) -> None:
        """Record tokens that need no pass."""

    def last_routing(self) -> Ints | None:
        """Return [T, MoE layers, K] of the last pass; None if it is not known."""
