"""Expert hosts as actors of a Ray cluster, each on a host of its own.

Ray starts them, watches them and starts them again. Rows go past it, over connections of our own:
a call of an actor takes ten times as long.
"""

import logging
import socket
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moe_infinity.errors import ConfigError

PLACE_S = 60.0  # for Ray to find a host for each of them
CORES = 1  # that Ray reserves for one; it may use all of its host's

logger = logging.getLogger(__name__)


@ray.remote(num_cpus=0, max_restarts=0)
class ExpertHostActor:
    """The process of one expert host."""

    def run(self, share_idx: int, address: tuple[str, int], key: bytes) -> None:
        """Until its head is gone."""
        import torch

        from moe_infinity.cluster.expert_host import serve
        from moe_infinity.cluster.wire import Wire
        from moe_infinity.errors import HostLost
        from moe_infinity.system.machine import num_cores

        torch.set_num_threads(num_cores())  # Ray has limited them to one
        try:
            serve(Wire.call(address, key), share_idx)
        except HostLost:
            return


class RayPlacement:
    """One actor for each share. Raises ConfigError if the cluster has not so many hosts."""

    is_one_machine = False

    def __init__(self, cluster: str, num_hosts: int) -> None:
        if not ray.is_initialized():
            join(cluster)
        self.listen_on: str = ray.util.get_node_ip_address()
        self.actors: dict[int, Any] = {}
        self._runs: dict[int, Any] = {}  # what ends with the actor
        self._group: PlacementGroup = placement_group(
            [{"CPU": CORES}] * num_hosts, strategy="STRICT_SPREAD"
        )
        if not self._group.wait(PLACE_S):
            remove_placement_group(self._group)
            raise ConfigError(
                f"expert_hosts: Ray has no {num_hosts} hosts with a free core each\n"
                "hint: `ray status` shows what it has; without --cluster they are processes here"
            )

    def start(self, share_idx: int, address: tuple[str, int], key: bytes) -> None:
        """The actor before is killed if it still runs."""
        self._end(share_idx)
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=share_idx - 1
        )
        actor_class: Any = ExpertHostActor
        actor = actor_class.options(scheduling_strategy=strategy).remote()
        self.actors[share_idx] = actor
        self._runs[share_idx] = actor.run.remote(share_idx, address, key)

    def has_ended(self, share_idx: int) -> bool:
        """Return True if the actor has ended or Ray has given it up."""
        ended, _ = ray.wait([self._runs[share_idx]], timeout=0)
        return bool(ended)

    def close(self) -> None:
        for share_idx in list(self.actors):
            self._end(share_idx)
        try:
            remove_placement_group(self._group)
        except (RayError, GetTimeoutError, ConnectionError) as error:
            logger.warning("Ray keeps the places of expert hosts: %s", error)

    def _end(self, share_idx: int) -> None:
        actor = self.actors.pop(share_idx, None)
        if actor is not None:
            ray.kill(actor)


REACH_S = 5.0


def join(cluster: str, **options: Any) -> None:
    """Connect this process to the Ray of an address ("auto": to the one on this machine). Raises
    ConfigError.
    """
    try:
        host, _, port = cluster.rpartition(":")
        if host and port.isdigit():  # else Ray tries for minutes
            socket.create_connection((host, int(port)), timeout=REACH_S).close()
        ray.init(address=cluster, logging_level=logging.WARNING, **options)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"no Ray at {cluster}: {error}") from error
