"""`moe-infinity serve` and `chat --url` before anything is loaded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moe_infinity.errors import ConfigError
from moe_infinity.server import command as serving_command
from moe_infinity.server.sequences import EngineConfig


def test_the_package_and_its_commands_need_nothing_of_the_server():
    check = (
        "import sys, moe_infinity.cli; print({'fastapi', 'uvicorn', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_a_missing_extra_is_named_with_what_installs_it(command, monkeypatch):
    monkeypatch.setattr(serving_command, "find_spec", lambda name: None)
    outcome = command("serve", "models/demo")
    assert outcome.code == 1
    assert outcome.said("fastapi, uvicorn, prometheus_client")
    assert outcome.said("pip install 'moe-infinity[serve]'")
    assert command("chat", "--url", "http://127.0.0.1:1").said("this needs httpx")


@pytest.mark.parametrize("arguments", [[], ["models/demo", "--url", "http://127.0.0.1:1"]])
def test_chat_wants_one_of_a_model_and_a_server(command, arguments):
    outcome = command("chat", *arguments)
    assert outcome.code == 2
    assert outcome.said("give one of MODEL and --url")


def test_a_server_that_is_not_there_is_an_error_with_its_address(command):
    outcome = command("chat", "--url", "http://127.0.0.1:1", stdin="hello\n")
    assert outcome.code == 1
    assert outcome.said("http://127.0.0.1:1: no answer")


@pytest.mark.parametrize(
    "bounds", [{"max_batch": 0}, {"max_queue": 1.5}, {"prefill_chunk": -1}, {"deadline_s": 0}]
)
def test_impossible_bounds_are_refused_by_name(bounds):
    with pytest.raises(ConfigError, match=next(iter(bounds))):
        EngineConfig(**bounds)


def test_what_cannot_be_served_is_said_before_the_first_request(command, tiny_checkpoint):
    outcome = command("serve", tiny_checkpoint, "--api-key", " ")
    assert outcome.code == 1
    assert outcome.said("the API key is empty")
