"""The server's sockets are bound before a model is loaded, and listen once it is."""

from __future__ import annotations

import socket

import pytest
from fastapi import FastAPI

from moe_infinity.errors import ConfigError
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.serve import bound_sockets, http_settings, serve_model


def test_a_bound_port_refuses_connections_until_there_is_someone_to_answer():
    with bound_sockets(ServeConfig(port=0)) as sockets:
        address = sockets[0].getsockname()
        assert address[1] != 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, timeout=5)


def test_who_listens_first_on_a_port_that_two_have_bound_has_it(moe):
    with bound_sockets(ServeConfig(port=0)) as sockets:
        port = sockets[0].getsockname()[1]
        config = ServeConfig(port=port)
        with bound_sockets(config) as ours:
            sockets[0].listen()
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
                serve_model(moe, config, ours)


def test_a_client_does_not_say_who_it_is_unless_a_proxy_is_named(monkeypatch):
    """By X-Forwarded-For one client would be many, each with a share of its own."""
    monkeypatch.delenv("FORWARDED_ALLOW_IPS", raising=False)
    assert not http_settings(FastAPI(), ServeConfig()).proxy_headers
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "10.0.0.1")
    assert http_settings(FastAPI(), ServeConfig()).proxy_headers
