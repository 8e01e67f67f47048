"""Several replicas of a model behind one address, on Ray Serve.

    client ──> Ingress ──router──> Replica: a model, its engine and the server's app, in one process

    moe-infinity serve MODEL --replicas 2
    serve run moe_infinity.cluster:build_app checkpoint=MODEL replicas=2

Ray starts, places, watches and restarts replicas. Needs the extra `cluster`.
"""

import dataclasses
import os
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import FastAPI, Request
from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response

from moe_infinity.cluster.config import ROUTERS, ClusterConfig, ReplicaOptions, numbers_of
from moe_infinity.cluster.forwarding import (
    AnswerPart,
    BodyRefused,
    Forwarded,
    HttpCall,
    Intake,
    answered,
    refused,
)
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.limits import CLIENTS

LOSSES = (RayActorError, ActorUnavailableError)
HEALTH_PERIOD_S = 2.0
DRAIN_S = 60.0  # for the answers under way when a replica is to end
METHODS = ["GET", "HEAD", "POST", "DELETE", "OPTIONS"]

ingress_app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


class ServedReplica:
    """One process with the whole model."""

    def __init__(self, checkpoint: str, model: dict[str, Any], server: dict[str, Any]) -> None:
        # Imported here: in the process that starts replicas torch has nothing to do.
        from moe_infinity.cluster.model import ClusterMoE
        from moe_infinity.server.app import create_app
        from moe_infinity.server.engine import Engine
        from moe_infinity.server.prefix_options import store_of

        config = ServeConfig(**server)
        self._moe = ClusterMoE(checkpoint, model)
        self._engine = Engine(self._moe, config, store_of(self._moe, config))
        self._app = create_app(self._moe, self._engine, config, is_forwarded=True)
        self._engine.start()

    async def answer(self, call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        """The answer to one HTTP request."""
        async for part in answered(self._app, call):
            yield part

    def check_health(self) -> None:
        """Ray restarts a replica whose engine has died."""
        if not self._engine.is_alive:
            raise RuntimeError(f"the engine died: {self._engine.death!r}")

    def pid(self) -> int:
        return os.getpid()

    def __del__(self) -> None:
        """Ray has waited for the answers under way."""
        if hasattr(self, "_engine"):
            self._engine.close()
            self._moe.close()


@serve.ingress(ingress_app)
class Ingress:
    """Has the clients' connections."""

    def __init__(self, replicas: DeploymentHandle, most_bytes: int) -> None:
        self._replicas = replicas.options(stream=True)
        self._intake = Intake(most_bytes)

    @ingress_app.api_route("/{path:path}", methods=METHODS)
    async def forward(self, request: Request, path: str) -> Response:
        try:
            call = await self._intake.read(request)
        except BodyRefused as refusal:
            return refused(refusal)
        return Forwarded(call, self._ask, LOSSES, self._intake.forget)

    async def _ask(self, call: HttpCall) -> AsyncGenerator[AnswerPart, None]:
        session = dict(call.scope["headers"]).get(b"x-session-id", b"").decode("latin-1")
        handle = self._replicas.options(session_id=session) if session else self._replicas
        parts = handle.answer.remote(call)
        try:
            async for part in parts:
                yield part
        finally:
            parts.cancel()


def build_app(
    checkpoint: str,
    *,
    replicas: int | str = 1,
    router: str = "least-loaded",
    model: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    cores: float = 1.0,
) -> serve.Application:
    """The application for Ray Serve.

    `replicas`: how many, or "1-4": as many as the queue needs. `model` are options of `MoE`,
    `server` those of `ServeConfig`, `cores` what Ray reserves for each replica. Raises ConfigError.
    """
    ReplicaOptions(replicas=str(replicas), router=router)
    model = model or {}
    ClusterConfig.from_options(None, model)
    config = ServeConfig(**(server or {}))
    numbers = numbers_of(replicas)
    options: dict[str, Any] = {"num_replicas": numbers.start}
    if len(numbers) > 1:
        options = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=numbers[0],
                max_replicas=numbers[-1],
                target_ongoing_requests=config.max_batch,
            )
        }
    deployed = serve.deployment(
        ServedReplica,
        name="Replica",
        # As many as the queue takes of all clients, and others that need no seat.
        max_ongoing_requests=config.max_batch + (CLIENTS.most + 1) * config.max_queue,
        health_check_period_s=HEALTH_PERIOD_S,
        graceful_shutdown_timeout_s=DRAIN_S,
        ray_actor_options={"num_cpus": cores},
        request_router_config=RequestRouterConfig(request_router_class=ROUTERS[router]),
        **options,
    )
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        max_ongoing_requests=10_000,  # replicas have the bounds
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(
        deployed.bind(checkpoint, model, dataclasses.asdict(config)), config.max_body
    )
