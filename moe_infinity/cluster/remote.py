"""Routed experts of which other hosts compute a part, see engine/experts.py."""

from __future__ import annotations

from torch import Tensor

from moe_infinity.cluster.head import ExpertHosts
from moe_infinity.engine.engine import LocalExperts, anonymous_step
from moe_infinity.engine.slots import SlotWork
from moe_infinity.experts import Step
from moe_infinity.routing import Routing


class RemoteExperts:
    """Asks hosts for the rows of their experts and computes the other experts meanwhile. What a
    lost host does not answer is computed here: every host can read the checkpoint.
    """

    def __init__(self, local: LocalExperts, hosts: ExpertHosts) -> None:
        self._local = local
        self.hosts = hosts

    @property
    def local(self) -> LocalExperts:
        """The experts of this process."""
        return self._local

    def begin_step(self, step: Step) -> None:
        """Begin a forward pass. Hosts that are back take part from now on."""
        with self._local.deciding:
            self.hosts.begin_step(step)
            self._local.begin_step(step)

    def layer(
        self, moe_layer_idx: int, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """Return [T, D], as `Experts.layer` does and with the same errors."""
        routing = Routing.of(top_k_index_TK, top_k_weights_TK)
        if not self._local.is_next(moe_layer_idx, routing.num_tokens):
            self.begin_step(anonymous_step(routing.num_tokens))
        work = self._local.path.computers[moe_layer_idx].begin(x_TD, routing)
        assert not isinstance(work, SlotWork), "hosts compute on CPUs"
        asked = self.hosts.ask(moe_layer_idx, routing, work)
        self._local.compute(moe_layer_idx, routing, asked.local, work)
        lost = asked.collect()
        if lost:
            self._local.compute_more(moe_layer_idx, routing, lost, work)
        return work.sum()

    def leave_step(self) -> None:
        """End a pass that did not reach its last layer; it is not recorded."""
        self._local.leave_step()

    def settle(self) -> None:
        """Return at once: each layer waits for its hosts."""

    def check_invariants(self) -> None:
        """Assert that the bookkeeping of this process is consistent."""
        self._local.check_invariants()

    def close(self) -> None:
        """End all hosts, then close as `LocalExperts.close` does."""
        self.hosts.close()
        self._local.close()
