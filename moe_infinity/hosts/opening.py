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
from moe_infinity.config import OffloadConfig, options_of
from moe_infinity.engine.build import build_engine
from moe_infinity.engine.engine import ExpertEngine
from moe_infinity.errors import ConfigError
from moe_infinity.hosts.head import HEAD, ExpertHosts, Placement
from moe_infinity.hosts.local import LocalProcesses
from moe_infinity.hosts.ownership import digest_of, owned_by, owners
from moe_infinity.memory.host import AUTOMATIC_SHARE
from moe_infinity.memory.machine import available_memory_bytes

# What a host needs of a config. The rest is about the model as a whole.
OF_A_HOST = (
    "host_memory", "device", "device_memory", "policy", "prefetch", "preload", "without",
    "config_from", "dtype", "expert_dtype", "exact", "experts_implementation",
    "trust_remote_code", "num_read_threads",
)  # fmt: skip

logger = logging.getLogger(__name__)


def of_one_machine(config: OffloadConfig) -> OffloadConfig:
    """The same, with the memory that is free shared among the head and its hosts."""
    if config.host_memory is not None:
        return config
    free = int(available_memory_bytes() * AUTOMATIC_SHARE)
    return replace(config, host_memory=free // (config.expert_hosts + 1))


def build_with_hosts(
    checkpoint: str, plan: Plan, reader: Reader, config: OffloadConfig, **parts: Any
) -> ExpertEngine:
    """`build_engine`, with the expert hosts that the config wants. Raises ConfigError."""
    if not config.expert_hosts:
        return build_engine(plan, reader, config, **parts)
    config = of_one_machine(config)
    hosts = open_expert_hosts(checkpoint, config, plan, reader)
    try:
        engine = build_engine(plan, reader, config, hosts=hosts, own_LE=hosts.own_LE, **parts)
        hosts.wait()
        return engine
    except BaseException:
        hosts.close()
        raise


def open_expert_hosts(
    checkpoint: str,
    config: OffloadConfig,
    plan: Plan,
    reader: Reader,
    placement: Placement | None = None,  # None: processes of this machine
    listen_on: str = "127.0.0.1",
) -> ExpertHosts:
    """Start them; `wait` says when they are ready. Raises ConfigError for experts that compute
    inside their model's own code.
    """
    apart = [layer.name for layer in plan.layers if isinstance(layer.adapter, ListOfExperts)]
    if apart:
        raise ConfigError(f"expert_hosts: {apart[0]} calls its experts one by one, here only")
    num_shares = config.expert_hosts + 1
    num_experts = max(layer.num_experts for layer in plan.layers)
    is_local = placement is None
    options = options_of(config)
    setup: dict[str, Any] = {
        "checkpoint": str(Path(checkpoint).resolve()) if Path(checkpoint).exists() else checkpoint,
        "options": {name: options[name] for name in OF_A_HOST},
        "num_shares": num_shares,
        # Bits of transformers depend on the number of threads, those of our kernels do not.
        "num_threads": max(torch.get_num_threads() // num_shares, 1)
        if is_local and not config.is_exact
        else None,
    }
    return ExpertHosts(
        placement or LocalProcesses(),
        setup,
        digest_of(plan, reader),
        owners_LE=owners(len(plan.layers), num_experts, num_shares),
        own_LE=owned_by(HEAD, num_shares, plan.layers),
        timeout_s=config.expert_host_timeout,
        listen_on=listen_on,
    )
