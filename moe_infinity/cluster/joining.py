"""Joining a Ray cluster, without the minutes for which Ray waits where none is."""

import logging
import socket
from typing import Any

import ray

from moe_infinity.errors import ConfigError

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
