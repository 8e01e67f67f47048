"""`moe-infinity serve` and `chat --url` before anything is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import nullcontext

import pytest

from moe_infinity import __main__ as commands
from moe_infinity.cli import serve as serving_command
from moe_infinity.errors import ConfigError
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.serve import bound_sockets


def test_commands_load_no_large_package_before_they_run():
    """Otherwise `--help` takes seconds, and `doctor` cannot say that one of them is broken."""
    names = "{'fastapi', 'uvicorn', 'torch', 'psutil', 'httpx'}"
    check = f"import sys, moe_infinity.__main__\nprint({names} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_idle_threads_of_torch_sleep_unless_the_user_says_otherwise(monkeypatch, given):
    """Torch reads the variable when it is imported, which is later: see above."""
    environ = dict(given)
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(commands, "run_app", lambda app: None)
    commands.main()
    assert environ == {"OMP_WAIT_POLICY": "PASSIVE"} | given


@pytest.mark.parametrize("module", ["moe_infinity", "moe_infinity.cli"])
def test_python_runs_the_commands_of_the_package_without_the_script(module):
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage: python -m moe_infinity " in done.stdout


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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--device", "cuda", "--prefetch"], "--device, --prefetch: "),
        (["--device", "auto"], "--device: "),  # typed, though it is the default
        (["--experts-implementation", "fast"], "--experts-implementation: "),
        (["--gpu-engine", "graphs"], "--gpu-engine: "),
    ],
)
def test_options_of_a_model_are_refused_with_a_server(command, options, named):
    outcome = command("chat", "--url", "http://127.0.0.1:1", *options, stdin="hello\n")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said(f"error: {named}")


def test_chat_and_serve_each_say_what_their_key_is_for(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = command("chat", "--help").out
    wanted = command("serve", "--help").out
    assert "API key of the server" in " ".join(shown.split())
    assert "Key that requests must send" not in shown
    assert "Key that requests must send" in " ".join(wanted.split())


def test_a_server_that_is_not_there_is_an_error_with_its_address(command):
    outcome = command("chat", "--url", "http://127.0.0.1:1", stdin="hello\n")
    assert outcome.code == 1
    assert outcome.said("http://127.0.0.1:1: no answer")


@pytest.mark.parametrize(
    "option",
    ["--max-batch=0", "--max-queue=1.5", "--prefill-chunk=-1", "--deadline=0", "--deadline=nan"],
)
def test_impossible_bounds_are_refused_by_name(command, option):
    outcome = command("serve", "models/demo", option)
    assert outcome.code == 2
    assert outcome.said(option.partition("=")[0])


def test_what_cannot_be_served_is_said_before_the_first_request(command, tiny_checkpoint):
    outcome = command("serve", tiny_checkpoint, "--api-key", " ")
    assert outcome.code == 1
    assert outcome.said("the API key is empty")


# the address


@pytest.fixture
def taken():
    """A port that someone listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_taken_port_is_an_error_before_the_model_is_opened(command, monkeypatch, taken):
    monkeypatch.setattr(
        serving_command, "open_model", lambda *args, **options: pytest.fail("opened")
    )
    outcome = command("serve", "models/demo", "--port", taken)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said(f"cannot listen on 127.0.0.1:{taken}: ")
    assert outcome.said("address already in use")
    assert outcome.said("hint: --port names another one")


@pytest.mark.parametrize("host", ["192.0.2.1", "x" * 70])
def test_a_host_that_cannot_be_bound_is_an_error_with_its_name(command, monkeypatch, host):
    monkeypatch.setattr(
        serving_command, "open_model", lambda *args, **options: pytest.fail("opened")
    )
    outcome = command("serve", "models/demo", "--host", host)
    assert outcome.code == 1
    assert outcome.said(f"cannot listen on {host}:8000: ")


def is_free(port: int) -> bool:
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def test_a_port_is_free_again_however_the_model_ends(command, monkeypatch):
    ports: list[int] = []

    def broken(*args: object, **options: object) -> nullcontext[None]:
        assert not is_free(ports[0])
        raise ConfigError("no such model")

    monkeypatch.setattr(serving_command, "open_model", broken)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports.append(listener.getsockname()[1])
    assert command("serve", "models/demo", "--port", ports[0]).said("no such model")
    assert is_free(ports[0])


def test_a_host_may_be_an_address_of_ipv6_or_have_several(command, monkeypatch):
    try:
        with bound_sockets(ServeConfig(host="::1", port=0)) as sockets:
            assert sockets[0].getsockname()[0] == "::1"
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with bound_sockets(ServeConfig(host="", port=0)) as sockets:
        assert {listener.family for listener in sockets} == {socket.AF_INET, socket.AF_INET6}
    assert all(listener.fileno() == -1 for listener in sockets)
    monkeypatch.setattr(
        serving_command, "open_model", lambda *args, **options: pytest.fail("opened")
    )
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        assert command("serve", "models/demo", "--host", "::1", "--port", port).said(
            f"[::1]:{port}"
        )
