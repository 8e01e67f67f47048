"""benchmarks/peers_file.py: the order of its processes, what cannot run, and how it goes on."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("peers_file", "peers_systems", "limits")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def result(seconds: float) -> dict[str, Any]:
    decode = {"tok_per_s": 4.0, "read_bytes": 5e6}
    return {"load_s": 1.0, "prompts": [{"s": seconds, "decode": decode}], "wall_s": 2.0}


def given(out: Path, **more: Any) -> argparse.Namespace:
    settings = {
        "model": out.with_name("m.gguf"), "out": out, "rounds": 2, "limits": "8GiB",
        "prompts": "32", "decode": 4, "systems": "ours,llama.cpp,fastllm", "pythons": "",
        "config": None, "timeout": 9,
    }  # fmt: skip
    return argparse.Namespace(**settings | more)


@pytest.fixture
def asked(modules: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which processes ran, of systems whose interpreters are there: all but fastllm."""
    found: list[str] = []

    def run_cell(system: Any, row: Any, args: Any, python: str) -> dict[str, Any]:
        found.append(f"{row.name}, {system.name}")
        return result(3.0)

    monkeypatch.setattr(modules.peers_file, "run_cell", run_cell)
    pythons = {"moe_infinity": sys.executable, "llama_cpp": "python"}
    monkeypatch.setattr(modules.peers_file, "interpreters", lambda given: pythons)
    return found


def test_systems_take_turns_and_what_cannot_run_says_why(modules, asked, tmp_path):
    found = modules.peers_file.run(given(tmp_path / "out.json"))
    cached, limited = "cached, 32 tokens", "limit 8GiB, 32 tokens"
    assert asked == [
        f"{cached}, ours",  # compiles kernels
        f"{cached}, ours", f"{cached}, llama.cpp", f"{limited}, ours", f"{limited}, llama.cpp",
        f"{cached}, llama.cpp", f"{cached}, ours", f"{limited}, llama.cpp", f"{limited}, ours",
    ]  # fmt: skip
    text = modules.peers_file.table(found)
    assert f"| {cached} | ours | 4 | 3 | 4 | 5 |" in text
    assert f"| {cached} | fastllm | no interpreter can import ftllm | | | |" in text
    assert "BigMoeOnEdge: " in text


def test_a_run_that_was_cut_goes_on(modules, asked, tmp_path):
    out = tmp_path / "out.json"
    modules.peers_file.run(given(out, rounds=1))
    asked.clear()
    found = modules.peers_file.run(given(out))
    assert len(asked) == 4
    assert json.loads(out.read_text()) == found


def test_a_system_that_is_not_known_is_refused(modules, tmp_path):
    with pytest.raises(SystemExit, match=r"no system 'olama', expected some of: ours, llama\.cpp"):
        modules.peers_file.run(given(tmp_path / "out.json", systems="olama"))


def test_an_interpreter_is_found_for_a_module_that_it_has(modules):
    assert modules.peers_systems.interpreters([])["moe_infinity"] == sys.executable
    with pytest.raises(SystemExit, match="no interpreter"):
        modules.peers_systems.interpreters(["/no/python"])


def test_a_process_that_takes_too_long_is_killed(modules, tmp_path):
    script = tmp_path / "sleeps.py"
    script.write_text("import time; time.sleep(60)")
    found = modules.limits.run_limited(str(script), {}, None, timeout_s=1.0)
    assert found == {"failed": "took longer than 1 s"}
