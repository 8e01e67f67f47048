"""The seam between a model and whatever computes its routed experts.

    LocalExperts    engine/engine.py      the six steps, in this process; CPU or one GPU
    RemoteExperts   cluster/model.py     some experts on other hosts, the others by LocalExperts
    DeviceExperts   gpu/engine.py         a GPU decides, and LocalExperts where it cannot

The model's hooks call `begin_step` before each forward pass, its experts modules call `layer`, and
`leave_step` ends a pass that an error or Ctrl-C cut short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from moe_infinity.experts import Step

if TYPE_CHECKING:
    from moe_infinity.engine.engine import LocalExperts


class Experts(Protocol):
    """Computes the routed experts of one model. Used by one thread at a time."""

    @property
    def local(self) -> LocalExperts:
        """The experts of this process, with the bookkeeping that reports read."""

    def begin_step(self, step: Step) -> None:
        """Begin a forward pass."""

    def layer(
        self, moe_layer_idx: int, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """Return [T, D], the routed experts' output for one MoE layer. Raises CheckpointError if an
        expert cannot be read, Cancelled if the caller has cancelled the prompt.
        """

    def note_state(self) -> None:
        """Note what the modules are like: from here on we change none, and notice who does."""

    def leave_step(self) -> None:
        """End a pass that did not reach its last layer; it is not recorded."""

    def synchronize(self) -> None:
        """Wait until the bookkeeping has recorded all that was computed."""

    def check_invariants(self) -> None:
        """Assert that all bookkeeping of slots is consistent."""

    def close(self) -> None:
        """Wait for work under way, stop all threads and close the files."""
