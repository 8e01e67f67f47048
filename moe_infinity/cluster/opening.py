"""Starts the expert hosts of a model, and says whether they pay."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moe_infinity.architectures.module_list import ListOfExperts
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.cluster.config import ClusterConfig
from moe_infinity.cluster.head import ExpertHosts, Placement
from moe_infinity.cluster.local import LocalProcesses
from moe_infinity.cluster.ownership import HEAD, digest_of, owners
from moe_infinity.cluster.remote import RemoteExperts
from moe_infinity.config import options_of
from moe_infinity.engine.build import build_experts
from moe_infinity.errors import ConfigError
from moe_infinity.memory.device import DeviceSlots
from moe_infinity.memory.slots import AUTOMATIC_SHARE, num_host_slots
from moe_infinity.system.machine import available_memory_bytes

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
        free = int(available_memory_bytes() * AUTOMATIC_SHARE)
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
    fit = num_host_slots(config.host_memory, slot_bytes=slot_bytes, num_experts=num_experts)
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
