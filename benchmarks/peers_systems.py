"""The systems that peers.py compares on one GGUF file, one entry each: how each is asked, and what
interpreter has it. peers_cell.py runs one of them in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

Options = dict[str, Any]


class Request(NamedTuple):
    """What every system is told in its own words."""

    file: str
    threads: int
    context: int  # tokens of the longest text
    limit_bytes: int | None  # of memory, page cache included
    config_from: str | None  # of files that do not say all of their config

    @property
    def expert_bytes(self) -> int | None:
        """Memory for experts, for systems that ask for it: what we take of it by default."""
        return None if self.limit_bytes is None else int(0.6 * self.limit_bytes)


class System(NamedTuple):
    name: str
    module: str  # which its interpreter can import
    runner: str  # of peers_cell.RUNNERS
    options: Callable[[Request], Options]
    bounds_memory: bool  # False: it relies on the page cache


def _ours(request: Request) -> Options:
    options = {} if request.config_from is None else {"config_from": request.config_from}
    return {"model": request.file, "options": options}


def _llama(repack: bool) -> Callable[[Request], Options]:
    def options(request: Request) -> Options:
        return {
            "gguf": request.file,
            "threads": request.threads,
            "repack": repack,
            "context": request.context,
        }

    return options


def _ik_llama(request: Request) -> Options:
    return {"gguf": request.file, "threads": request.threads, "context": request.context}


def _fastllm(request: Request) -> Options:
    given = {"threads": request.threads, "expert_bytes": request.expert_bytes}
    return {"gguf": request.file, **given}


SYSTEMS = (
    System("ours", "moe_infinity", "ours", _ours, True),
    System("llama.cpp", "llama_cpp", "llama.cpp", _llama(False), False),
    System("llama.cpp repacked", "llama_cpp", "llama.cpp", _llama(True), False),
    System("ik_llama.cpp", "ik_llama_cpp", "ik_llama.cpp", _ik_llama, False),
    System("fastllm", "ftllm", "fastllm", _fastllm, True),
)
FIND = (
    "import sys; from importlib.util import find_spec; "
    "print(*(name for name in sys.argv[1:] if find_spec(name)))"
)
# Systems without an entry, and why.
LEFT_OUT = {
    "BigMoeOnEdge": "no package: source with a fork of llama.cpp, takes text and no ids",
    "moe-stream": "no package, its source was not reachable",
    "llama.cpp with page hints": "not a program that people have",
    "neurostream": "multiplies unpacked float32 on a CPU; installed, and not run yet",
    "flyweight": "its benchmark has texts of its own; it bounds no memory",
    "kt-kernel, SGLang, FreeToken, ExLlamaV3": "need a GPU",
}


def interpreters(pythons: list[str]) -> dict[str, str]:
    """Return an interpreter for each module that one of these has, ours first. Raises SystemExit
    for one that is none.
    """
    modules = sorted({system.module for system in SYSTEMS})
    found: dict[str, str] = {}
    for python in (sys.executable, *pythons):
        try:
            done = subprocess.run([python, "-c", FIND, *modules], capture_output=True, text=True)
        except OSError as error:
            raise SystemExit(f"{python} is no interpreter: {error}") from error
        found = dict.fromkeys(done.stdout.split(), python) | found
    return found
