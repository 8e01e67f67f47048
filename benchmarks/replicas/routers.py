"""Which replica gets a request, in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol
from zlib import crc32

from benchmarks.replicas.affinity import RequestForecast, choose, similarity
from benchmarks.replicas.replica import Replica, SimulatedRequest, decode_matrix
from moe_infinity.predict.tables import Floats

POINTS_OF_A_REPLICA = 64  # on the circle of the consistent hash


class ReplicaRouter(Protocol):
    """Says which replica gets a request."""

    def choose(self, request: SimulatedRequest, replicas: Sequence[Replica]) -> int:
        """Its position."""

    def note_end(self, request: SimulatedRequest) -> None:
        """A request has ended."""


class RoundRobin:
    """One after the other."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._num_chosen = 0

    def choose(self, request: SimulatedRequest, replicas: Sequence[Replica]) -> int:
        self._num_chosen += 1
        return (self._num_chosen - 1) % len(replicas)

    def note_end(self, request: SimulatedRequest) -> None:
        """Nothing is learned."""


class LeastLoaded(RoundRobin):
    """The one with the fewest requests."""

    def choose(self, request: SimulatedRequest, replicas: Sequence[Replica]) -> int:
        first = super().choose(request, replicas)
        order = [(first + step) % len(replicas) for step in range(len(replicas))]
        return min(order, key=lambda idx: replicas[idx].load)


class SessionHash(RoundRobin):
    """Consistent hashing: requests of one session go to one replica."""

    def choose(self, request: SimulatedRequest, replicas: Sequence[Replica]) -> int:
        points = sorted(
            (crc32(f"{idx} {point}".encode()), idx)
            for idx in range(len(replicas))
            for point in range(POINTS_OF_A_REPLICA)
        )
        at = crc32(request.session.encode())
        return next((idx for point, idx in points if point >= at), points[0][1])


class EamRouter:
    """The replica that served what is like the request, as far as its prompt tells."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._forecast = RequestForecast(num_layers, num_experts)

    def choose(self, request: SimulatedRequest, replicas: Sequence[Replica]) -> int:
        wanted_LE = self._wanted(request)
        base_LE = self._forecast.base_LE
        return choose(
            [replica.load for replica in replicas],
            [similarity(wanted_LE, replica.served.beyond(base_LE)) for replica in replicas],
        )

    def _wanted(self, request: SimulatedRequest) -> Floats:
        return self._forecast.predict(request.prompt_ids)

    def note_end(self, request: SimulatedRequest) -> None:
        eam_LE = decode_matrix(request.sequence, self._forecast.base_LE.shape)
        self._forecast.learn(request.prompt_ids, eam_LE)


class EamOracle(EamRouter):
    """The same, if it knew the request's matrix."""

    def _wanted(self, request: SimulatedRequest) -> Floats:
        base_LE = self._forecast.base_LE
        eam_LE = decode_matrix(request.sequence, base_LE.shape)
        wanted_LE: Floats = eam_LE / eam_LE.sum(axis=1, keepdims=True) - base_LE
        return wanted_LE


ROUTERS: dict[str, Callable[[int, int], ReplicaRouter]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "hash": SessionHash,
    "eam": EamRouter,
    "eam-oracle": EamOracle,
}
