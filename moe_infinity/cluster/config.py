"""The options of a model that several processes or hosts share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from moe_infinity.config import OffloadConfig
from moe_infinity.errors import ConfigError

MOST_HOSTS = 64
MOST_SILENCE_S = 3600
ROUTERS = {
    "least-loaded": "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
    "hash": "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter",
}


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


@dataclass(kw_only=True)
class ReplicaOptions:
    """Several processes that serve one model, on Ray. Raises ConfigError."""

    replicas: Annotated[
        str | None,
        typer.Option(
            help="How many, each with the whole model and its own memory: '2', or '1-4' for as "
            "many as the queue needs. Needs the extra cluster.",
            metavar="N|MIN-MAX",
        ),
    ] = None
    router: Annotated[
        str,
        typer.Option(
            help="Which of them gets a request: least-loaded, or hash, by the header x-session-id."
        ),
    ] = "least-loaded"

    def __post_init__(self) -> None:
        if self.replicas is not None:
            numbers_of(self.replicas)
        if self.router not in ROUTERS:
            names = ", ".join(ROUTERS)
            raise ConfigError(f"unknown router {self.router!r}, expected one of: {names}")


def numbers_of(replicas: int | str) -> range:
    """From the least to the most replicas, of "2" or "1-4". Raises ConfigError."""
    first, _, last = str(replicas).partition("-")
    try:
        numbers = range(int(first), int(last or first) + 1)
    except ValueError:
        numbers = range(0)
    if not numbers or numbers[0] < 1:
        raise ConfigError(f"{replicas!r} is not a number of replicas, as '2' or '1-4'")
    return numbers
