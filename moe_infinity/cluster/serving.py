"""`moe-infinity serve --replicas`: starts Ray, or joins it, and serves until a signal comes."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import ray
from ray import serve

from moe_infinity.cluster.config import numbers_of
from moe_infinity.cluster.placement import join
from moe_infinity.cluster.replicas import build_app
from moe_infinity.server.config import LOOPBACK, ServeConfig
from moe_infinity.system.files import expanded
from moe_infinity.system.machine import core_limit, num_cores

OBJECT_STORE_BYTES = 128 << 20  # of a Ray of our own; answers are small

logger = logging.getLogger(__name__)


@contextmanager
def joined(cluster: str | None) -> Iterator[None]:
    """Inside, connected to Ray: to that of an address, or to one of this machine alone. Raises
    ConfigError.
    """
    if cluster is None:
        keep_others_out()
        options = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        join("local", **options)
    else:
        join(cluster)
    try:
        yield
    finally:
        ray.shutdown()


def keep_others_out() -> None:
    """Give the Ray of this process a token of its own. Ray listens on all addresses of the machine,
    runs the code of whoever has its token, and would keep one where other users may read it.
    """
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        logger.warning("RAY_AUTH_MODE=disabled: whoever reaches this machine can run code on it")
        return
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def serve_replicas(
    checkpoint: str,
    config: ServeConfig,
    model: dict[str, Any],
    *,
    replicas: str,
    router: str,
) -> None:
    """Serve until SIGTERM or Ctrl-C, and then finish the answers under way. Raises ConfigError."""
    if Path(checkpoint).exists():
        checkpoint = str(Path(checkpoint).absolute())  # replicas have another working folder
    if config.host not in LOOPBACK and not config.keys():
        logger.warning("anyone who reaches %s can use this model: no API key", config.host)
    cluster = model["cluster"]
    model = model | {"cluster": "auto" if model["expert_hosts"] else None}
    cores = 1.0
    if cluster is None:
        allowed = min(num_cores(), core_limit() or math.inf)
        cores = max(allowed // numbers_of(replicas)[-1], 1)
    app = build_app(
        checkpoint,
        replicas=replicas,
        router=router,
        # Replicas have another working folder.
        model={name: str(v.absolute()) if isinstance(v, Path) else v for name, v in model.items()},
        server=_told(config),
        cores=cores,
    )
    stopped = Event()
    with joined(cluster):
        before = [
            (number, signal.signal(number, lambda *_: stopped.set()))
            for number in (signal.SIGINT, signal.SIGTERM)
        ]
        try:
            serve.start(http_options={"host": config.host, "port": config.port})
            serve.run(app)
            stopped.wait()
        finally:
            for number, handler in before:
                signal.signal(number, handler)
            serve.shutdown()


def _told(config: ServeConfig) -> dict[str, Any]:
    """Return the config of a replica, with the keys: their file may be on this machine only. It has
    another working folder.
    """
    keys = list(config.keys()) or None
    store = config.prompt_store
    if store not in (None, "off"):
        store = str(expanded(store).absolute())
    told = dataclasses.replace(config, api_key=keys, api_key_file=None, prompt_store=store)
    return dataclasses.asdict(told)
