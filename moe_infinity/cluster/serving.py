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
from typing import Any, TypeVar

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
    if config.host not in LOOPBACK and not config.keys():
        logger.warning("anyone who reaches %s can use this model: no API key", config.host)
    cluster = model["cluster"]
    model = model | {"cluster": "auto" if model["expert_hosts"] else None}
    cores = 1.0
    if cluster is None:
        allowed = min(num_cores(), core_limit() or math.inf)
        cores = max(allowed // numbers_of(replicas)[-1], 1)
    paths = {name: value for name, value in model.items() if isinstance(value, Path)}
    model |= {name: str(path.absolute()) for name, path in paths.items()}
    app = build_app(
        from_anywhere(checkpoint),
        replicas=replicas,
        router=router,
        model=model | {"config_from": from_anywhere(model.get("config_from"))},
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


Named = TypeVar("Named", str, None)


def from_anywhere(name: Named) -> Named:
    """Return the absolute path of what is here, since replicas have another working folder; another
    name, such as a hub id, as it is.
    """
    if name is None or not os.path.exists(expanded(name)):
        return name
    return str(expanded(name).absolute())


def _told(config: ServeConfig) -> dict[str, Any]:
    """Return the config of a replica, with the keys: their file may be on this machine only."""
    keys = list(config.keys()) or None
    store = config.prompt_store
    if store is not None and store != "off":  # it may be made later
        store = str(expanded(store).absolute())
    places = None if config.allow_media is None else [*map(from_anywhere, config.allow_media)]
    told = dataclasses.replace(
        config, api_key=keys, api_key_file=None, prompt_store=store, allow_media=places
    )
    return dataclasses.asdict(told)
