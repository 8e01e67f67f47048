"""`python -m moe_infinity.entrypoints.openai.api_server`: what it makes of the older options."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from moe_infinity import __main__ as cli
from moe_infinity.entrypoints.openai import api_server
from moe_infinity.memory import cuda


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """start("--option", ...) -> the arguments that `moe-infinity` is given then."""
    monkeypatch.setattr(cli, "main", lambda: None)

    def start(*options: object, device_bytes: int | None = None) -> list[str]:
        monkeypatch.setattr(cuda, "device_memory_bytes", lambda device: device_bytes)
        monkeypatch.setattr(sys, "argv", ["api_server", *map(str, options)])
        api_server.main()
        return sys.argv

    return start


def test_the_older_options_become_those_of_serve(start):
    given = start("--model", "M", "--offload-dir", "D", "--port", 80)
    assert given == ["moe-infinity", "serve", "M", "--device", "auto", "--port", "80"]


def test_the_ratio_is_honoured_where_there_is_a_gpu(start, capsys):
    ratio = ("--model", "M", "--device-memory-ratio", 0.5)
    given = start(*ratio, "--device=cuda:1", device_bytes=1000)
    assert given[3:] == ["--device", "cuda:1", "--device-memory", "500"]
    assert "no effect" not in capsys.readouterr().err
    assert "--device-memory" not in start(*ratio)
    assert "--device-memory-ratio has no effect: torch finds no CUDA" in capsys.readouterr().err


@pytest.mark.parametrize("ratio", ["0", "1.5", "-1", "nan", "half"])
def test_a_ratio_that_is_none_is_wrong_usage(start, capsys, ratio):
    for device_bytes in (None, 1000):
        with pytest.raises(SystemExit) as stopped:
            start("--model", "M", "--device-memory-ratio", ratio, device_bytes=device_bytes)
        assert stopped.value.code == 2
        assert "ratio" in capsys.readouterr().err


def test_help_says_nothing_of_this_machine(start, capsys):
    with pytest.raises(SystemExit):
        start("--help")
    told = " ".join(capsys.readouterr().out.split())
    assert "torch finds" not in told
    assert "without a GPU, no effect" in told
