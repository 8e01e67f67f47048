"""A model whose experts are spread over several hosts, used like any other."""

from __future__ import annotations

from moe_infinity.architectures.early_router import EarlyRouter
from moe_infinity.checkpoint.loading import LoadedModel
from moe_infinity.cluster.config import ClusterConfig
from moe_infinity.cluster.head import ExpertHosts
from moe_infinity.cluster.opening import build_with_hosts
from moe_infinity.cluster.remote import RemoteExperts
from moe_infinity.engine.experts import Experts
from moe_infinity.model import MoE


class ClusterMoE(MoE):
    """An `MoE` that also takes the options of `ClusterConfig`.

    from moe_infinity.cluster.model import ClusterMoE
    moe = ClusterMoE("models/demo", expert_hosts=2)
    """

    config_class = ClusterConfig
    config: ClusterConfig

    @property
    def hosts(self) -> ExpertHosts | None:
        """The expert hosts; None without any."""
        return self._experts.hosts if isinstance(self._experts, RemoteExperts) else None

    def _build_experts(self, loaded: LoadedModel, early_router: EarlyRouter | None) -> Experts:
        if not self.config.expert_hosts:
            return super()._build_experts(loaded, early_router)
        return build_with_hosts(
            self.checkpoint,
            loaded.plan,
            loaded.reader,
            self.config,
            device_slots=self._device.slots,
        )
