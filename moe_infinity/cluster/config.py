"""The options of a model whose experts are spread over several hosts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from moe_infinity.config import OffloadConfig
from moe_infinity.errors import ConfigError

MOST_HOSTS = 64
MOST_SILENCE_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(OffloadConfig):
    """The options of one model, and those of its expert hosts."""

    expert_hosts: int = 0  # other hosts, each with its share of the experts in its own memory
    cluster: str | None = None  # address of the Ray cluster that has them; None: processes here
    expert_host_timeout: float = 2.0  # seconds of silence after which one is given up

    def __post_init__(self) -> None:
        OffloadConfig.__post_init__(self)  # super() does not work in a dataclass with slots
        if not isinstance(self.cluster, str | None):
            raise ConfigError(f"cluster must be the address of a Ray cluster, got {self.cluster!r}")
        if type(self.expert_hosts) is not int or not 0 <= self.expert_hosts <= MOST_HOSTS:
            raise ConfigError(
                f"expert_hosts must be a whole number from 0 to {MOST_HOSTS}, "
                f"got {self.expert_hosts!r}"
            )
        if self.device == "mps" and self.expert_hosts:
            raise ConfigError("expert_hosts: experts compute on CPUs there, so use device='cpu'")
        silence = self.expert_host_timeout
        if not isinstance(silence, int | float) or not 0 < silence <= MOST_SILENCE_S:
            raise ConfigError(
                f"expert_host_timeout must be seconds above 0, at most {MOST_SILENCE_S}, "
                f"got {silence!r}"
            )
        if self.expert_hosts and self.early_router:
            raise ConfigError("early_router does not know the caches of other hosts")


@dataclass(kw_only=True)
class ClusterOptions:
    """Options of `ClusterConfig` that `OffloadConfig` does not have."""

    expert_hosts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Other hosts that share the experts, each with host memory of its own; without "
            "--cluster processes of this machine.",
        ),
    ] = 0
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Address of a Ray cluster for --expert-hosts or --replicas. Needs the extra "
            "cluster.",
            metavar="ADDRESS",
        ),
    ] = None
    expert_host_timeout: Annotated[
        float,
        typer.Option(min=0.001, help="Seconds of silence after which one of them is given up."),
    ] = 2.0
