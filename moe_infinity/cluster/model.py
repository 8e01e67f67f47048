"""A model whose experts are spread over several hosts, used like any other."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_infinity.architectures.early_router import EarlyRouter
from moe_infinity.architectures.module_list import ListOfExperts
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.cluster.config import ClusterConfig
from moe_infinity.cluster.head import ExpertHosts, Placement
from moe_infinity.cluster.local import LocalProcesses
from moe_infinity.cluster.steps import HEAD, digest_of, owners
from moe_infinity.config import options_of
from moe_infinity.engine.build import build_experts, free_for_experts
from moe_infinity.engine.engine import LocalExperts, anonymous_step
from moe_infinity.engine.experts import Experts
from moe_infinity.engine.slots import SlotWork
from moe_infinity.errors import ConfigError
from moe_infinity.experts import Routing, Step
from moe_infinity.loading.model import LoadedModel
from moe_infinity.memory.device import DeviceSlots
from moe_infinity.memory.room import ProcessMemory
from moe_infinity.memory.slots import num_host_slots
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
        self._local.run_layer(moe_layer_idx, routing, asked.local, work)
        lost = asked.collect()
        if lost:
            self._local.run_recorded_layer(moe_layer_idx, routing, lost, work)
        return work.sum()

    def note_state(self) -> None:
        """Note what the modules of the experts are like."""
        self._local.note_state()

    def leave_step(self) -> None:
        """End a pass that did not reach its last layer; it is not recorded."""
        self._local.leave_step()

    def synchronize(self) -> None:
        """Return at once: each layer waits for its hosts."""

    def check_invariants(self) -> None:
        """Assert that the bookkeeping of this process is consistent."""
        self._local.check_invariants()

    def close(self) -> None:
        """End all hosts, then close as `LocalExperts.close` does."""
        self.hosts.close()
        self._local.close()


# What a host needs of a config. The rest is about the model as a whole.
OF_A_HOST = (
    "host_memory", "policy", "prefetch", "preload", "stream_layers", "without",
    "config_from", "dtype", "expert_dtype", "exact", "experts_implementation",
    "trust_remote_code", "num_read_threads",
)  # fmt: skip

DISK_BYTES_PER_S = 1e9  # a usual SSD; not measured

logger = logging.getLogger(__name__)


def build_with_hosts(
    checkpoint: str,
    plan: Plan,
    reader: Reader,
    config: ClusterConfig,
    *,
    device_slots: DeviceSlots | None,
) -> RemoteExperts:
    """Start the expert hosts that the config asks for, and build the experts of this process beside
    them. Raises ConfigError.
    """
    apart = [layer.name for layer in plan.layers if isinstance(layer.adapter, ListOfExperts)]
    if apart:
        raise ConfigError(f"expert_hosts: {apart[0]} calls its experts one by one, here only")
    if device_slots is not None:
        raise ConfigError("expert_hosts: experts compute on CPUs there, so use device='cpu'")
    placement = _placement(config)
    local_config = config
    if placement.is_one_machine and config.host_memory is None:  # share what is free
        free = free_for_experts(ProcessMemory(config.memory_bytes), plan, config)
        local_config = replace(config, host_memory=free // (config.expert_hosts + 1))
    hosts = _start(checkpoint, plan, reader, local_config, placement)
    try:
        local = build_experts(plan, reader, local_config, local_LE=hosts.local_LE)
        _say_whether_it_pays(plan, config, hosts.wait())
        return RemoteExperts(local, hosts)
    except BaseException:
        hosts.close()
        raise


def _placement(config: ClusterConfig) -> Placement:
    if config.cluster is None:
        return LocalProcesses()
    try:
        from moe_infinity.cluster.placement import RayPlacement
    except ImportError as error:
        raise ConfigError("cluster: this needs Ray: pip install 'moe-infinity[cluster]'") from error
    return RayPlacement(config.cluster, config.expert_hosts)


def _start(
    checkpoint: str, plan: Plan, reader: Reader, config: ClusterConfig, placement: Placement
) -> ExpertHosts:
    num_shares = config.expert_hosts + 1
    owners_LE = owners(plan.layers, num_shares)
    options = options_of(config)
    num_threads = None
    # Bits of transformers depend on the number of threads, those of our kernels do not.
    if placement.is_one_machine and not config.is_exact:
        num_threads = max(torch.get_num_threads() // num_shares, 1)
    setup: dict[str, Any] = {
        "checkpoint": str(Path(checkpoint).absolute()) if Path(checkpoint).exists() else checkpoint,
        "options": {"device": "cpu", **{name: options[name] for name in OF_A_HOST}},
        "num_shares": num_shares,
        "num_threads": num_threads,
    }
    return ExpertHosts(
        placement,
        setup,
        digest_of(plan, reader),
        owners_LE=owners_LE,
        local_LE=owners_LE == HEAD,
        timeout_s=config.expert_host_timeout,
    )


def _say_whether_it_pays(plan: Plan, config: ClusterConfig, exchange_s: float) -> None:
    """Log what hosts cost each token, and what that has to save."""
    slot_bytes = max(recipes.layout.slot_bytes for recipes in plan.recipes)
    num_experts = sum(layer.num_experts for layer in plan.layers)
    fit = num_host_slots(
        config.host_memory,
        slot_bytes=slot_bytes,
        num_experts=num_experts,
        free_bytes=free_for_experts(ProcessMemory(config.memory_bytes), plan, config),
    )
    token_s = len(plan.layers) * exchange_s
    costs = (
        f"an exchange with an expert host takes {exchange_s * 1e3:.2f} ms at least, "
        f"{token_s * 1e3:.1f} ms a token in {len(plan.layers)} layers"
    )
    if fit == num_experts:
        logger.warning("%s, and all experts fit here: without expert hosts it is faster", costs)
        return
    read_s = plan.recipes[0].bytes_per_expert() / DISK_BYTES_PER_S
    logger.info(
        "%s: as much as %.1f experts read from a disk of 1 GB/s. That pays if more of those that "
        "each token misses here are in memory there", costs, token_s / read_s,
    )  # fmt: skip
