"""benchmarks/peers.py: its order, how it goes on, what a process measures, and the report."""

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
CONFIG = {
    "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 8,
    "moe_intermediate_size": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "vocab_size": 10,
}  # fmt: skip
DENSE, EMBEDDING, EXPERT = 2000, 160, 100
RATES = {
    "disk_random": 1e3, "disk_sequential": 2e3, "memory": 1e4, "products_bf16": 1e12,
    "products_float32": 2e12,
}  # fmt: skip


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    names = ("peers", "peers_cell", "peers_plan", "peers_report", "peers_rows")
    return SimpleNamespace(**{name: importlib.import_module(name) for name in names})


def result(prompts: Any, seconds: float, tok_per_s: float) -> dict[str, Any]:
    """What a process prints whose every prompt takes as long."""
    step = {"read_bytes": 500.0, "activated": 4.0}
    decode = step | {"tok_per_s": tok_per_s}
    found = [{"s": seconds, **step} | ({"decode": decode} if p[2] else {}) for p in prompts]
    more = {"about": "as it is", "others_cores": 0.5, "wall_s": 2.0}
    return {"load_s": 1.0, "prompts": found, **more}


def stored(modules: Any) -> dict[str, Any]:
    """Three rounds in bf16: we take 2, 3 and 4 s for a prompt, exact fails, llama.cpp takes 6."""
    cells: dict[str, Any] = {}
    sizes = {"dense": DENSE, "embedding": EMBEDDING, "expert": EXPERT, "num_experts": 8}
    plan = modules.peers_plan
    for scenario in plan.scenarios(["4GiB"]):
        told = {
            "ours": [result(scenario.prompts, s, 8.0) for s in (2.0, 3.0, 4.0)],
            "ours, exact": [{"failed": "exit status -9", "wall_s": 1.0}] * 3,
            "llama.cpp": [result(scenario.prompts, 6.0, 2.0)] * 3,
        }
        if scenario.limit:
            told["ours, prefetch on"] = [result(scenario.prompts, 2.0, 4.0)] * 3
        cells |= {plan.key_of(plan.FORMATS[0], scenario, name): each for name, each in told.items()}
    machine = {"cpu": "a CPU", "cores": 2, "memory_bytes": 2**34}
    return {
        "about": {"model": "big", "config": CONFIG, "text": 0, "machine": machine},
        "sizes": {"bf16": {"ours": sizes, "llama.cpp": sizes}},
        "rates": [RATES],
        "cells": cells,
    }


def line_of(modules: Any, what: str, system: str = "ours") -> list[str]:
    """The measured cells of a line: median and spread, ratio and spread, bound."""
    lines = modules.peers_report.measurements(stored(modules))
    line = next(line for line in lines if (line["what"], line["system"]) == (what, system))
    return list(line.values())[4:]


def test_a_line_has_median_spread_ratio_and_bound(modules):
    needed = DENSE - EMBEDDING + 4 * EXPERT
    warm = "prompt, warm, 600 tokens"
    assert line_of(modules, warm) == ["3", "2", "4", "2", "1.5", "3", f"{needed / 1e4:.3g}"]
    assert line_of(modules, warm, "llama.cpp")[:4] == ["6", "6", "6", ""]
    cold = line_of(modules, "first token, cold, 32 tokens")
    assert cold[:3] == ["4", "3", "5"]  # with loading
    assert cold[6] == f"{needed / 2e3:.3g}"
    limit = line_of(modules, "decode, limit 4GiB")
    assert limit[3:] == ["4", "4", "4", "2"]  # 1e3 bytes per second, 500 per token
    assert line_of(modules, "decode, warm, 8 sequences")[6] == f"{8 * 1e4 / needed:.3g}"
    assert line_of(modules, "load, cached", "llama.cpp")[6] == ""  # what is mapped is not read
    assert line_of(modules, "decode, limit 4GiB", "ours, prefetch on")[0] == "4"


def test_failures_and_rates_are_reported(modules):
    text = modules.peers_report.conditions(stored(modules))
    assert "bf16 cold 32 | ours, exact: exit status -9." in text
    assert "Other programs used 0.5 (0.5 .. 0.5) of its cores" in text
    rates = [
        line for line in modules.peers_report.measurements(stored(modules)) if not line["system"]
    ]
    assert [line["median"] for line in rates] == ["1e-06", "2e-06", "1e-05", "1000", "2000"]


def test_what_was_not_measured_is_left_out(modules):
    results = stored(modules)
    results["cells"] = {key: each for key, each in results["cells"].items() if " cold " in key}
    lines = modules.peers_report.measurements(results)
    ratios = [line["times llama.cpp"] for line in lines if line["system"] == "ours"]
    assert ratios == ["1.75"] * 4
    assert "| decode" not in modules.peers_report.table(lines)


def test_the_table_has_medians_and_ratios_of_the_csv(modules, tmp_path):
    report = modules.peers_report
    lines = report.measurements(stored(modules))
    report.write_csv(lines, tmp_path / "peers.csv")
    assert report.read_csv(tmp_path / "peers.csv") == lines
    table = report.table(lines).splitlines()
    assert table[0] == "|  | bf16 |"
    assert "| prompt, warm, 600 tokens, s | 3.00 (2.0) |" in table
    assert not any("load" in line for line in table)


def test_the_table_replaces_itself_and_nothing_else_of_the_page(modules, tmp_path):
    report, page = modules.peers_report, tmp_path / "performance.md"
    page.write_text(f"By hand.\n{report.BEGIN}\nfirst\n{report.END}\nAnd after.\n")
    report.update_page(page, "second", tmp_path / "plots" / "peers.svg")
    text = page.read_text()
    assert text.startswith("By hand.\n")
    assert text.endswith(f"{report.END}\nAnd after.\n")
    assert "first" not in text
    assert "second\n\n![" in text
    assert "(plots/peers.svg)" in text


def test_a_page_without_the_marks_is_left_alone(modules, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("By hand.\n")
    with pytest.raises(SystemExit, match="has no place for the table"):
        modules.peers_report.update_page(page, "text", None)
    assert page.read_text() == "By hand.\n"


def test_the_plot_is_drawn(modules, tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    modules.peers_report.plot(
        modules.peers_report.measurements(stored(modules)), tmp_path / "peers.svg"
    )
    drawn = (tmp_path / "peers.svg").read_text()
    assert "decode, limit 4GiB" in drawn
    assert "4-bit" not in drawn  # it was not measured


def test_flops_count_weights_attention_and_the_last_logits(modules):
    per_token = 8 * (2 * 8 + 2 * 4 + 4 + 3 * 2 * 3)  # q and o, k and v, router, experts
    assert modules.peers_plan.flops(CONFIG, 5) == 2 * (2 * 5 * (per_token + 8 * 5) + 10 * 8)


@pytest.fixture
def asked(modules, monkeypatch, tmp_path):
    """A run without models: the processes that were asked for; the third never ends."""
    asked: list[tuple[str, Any]] = []
    peers = modules.peers

    def run_limited(file: str, cell: Any, limit_bytes: Any, python: str) -> dict[str, Any]:
        asked.append((cell["runner"], limit_bytes))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return result(cell["prompts"], 1.0, 1.0)

    sizes = modules.peers_plan.Sizes(DENSE, EMBEDDING, EXPERT, 8)
    monkeypatch.setattr(peers, "run_limited", run_limited)
    monkeypatch.setattr(peers, "rates_now", lambda model: modules.peers_plan.Rates(**RATES))
    monkeypatch.setattr(peers.Run, "_compile_kernels", lambda self, cells: None)
    for name in ("make_files", "require_llama_cpp"):
        monkeypatch.setattr(peers, name, lambda *args: None)
    for name in ("sizes_of_ours", "sizes_of_gguf"):
        monkeypatch.setattr(peers, name, lambda *args: sizes)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny.gguf").write_bytes(b"")
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tiny" / "tokenizer.json").symlink_to(ROOT / "models" / "demo" / "tokenizer.json")
    return asked


def arguments(folder: Path, **more: Any) -> argparse.Namespace:
    given = {"rounds": 2, "rows": "bf16 cold 32", "limits": "2GiB", "llama_python": "python"}
    paths = {"model": folder / "tiny", "out": folder / "out.json"}
    return argparse.Namespace(**given | paths | more)


def test_a_run_that_is_cut_goes_on_where_it_was(modules, asked, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        modules.peers.Run(arguments(tmp_path)).run()
    kept = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert [len(each) for each in kept.values()] == [1, 1]
    asked.append(("cut", None))
    found = modules.peers.Run(arguments(tmp_path)).run()
    assert {key: len(each) for key, each in found["cells"].items()} == {
        "bf16 cold 32 | ours": 2, "bf16 cold 32 | ours, exact": 2, "bf16 cold 32 | llama.cpp": 2,
    }  # fmt: skip
    # The order moves on: what came second in the first round is first in the second.
    assert [runner for runner, _ in asked[4:]] == ["llama.cpp", "ours", "llama.cpp", "ours"]
    asked.clear()
    modules.peers.Run(arguments(tmp_path)).run()
    assert asked == []


def test_results_of_another_model_are_not_mixed_in(modules, asked, tmp_path):
    (tmp_path / "out.json").write_text(json.dumps(stored(modules)))
    with pytest.raises(SystemExit, match="another model, text or machine"):
        modules.peers.Run(arguments(tmp_path))


def test_an_interpreter_without_llama_cpp_is_refused(modules):
    with pytest.raises(SystemExit, match="cannot import llama_cpp"):
        modules.peers.require_llama_cpp("false")


def test_limits_reach_every_system_and_an_unknown_row_is_refused(modules, asked, tmp_path):
    asked += [("", None)] * 3
    modules.peers.Run(arguments(tmp_path, rounds=1, rows="bf16 limit*")).run()
    assert [limit for _, limit in asked[3:]] == [2 << 30] * 4
    with pytest.raises(SystemExit, match="no row has such a name"):
        modules.peers.Run(arguments(tmp_path, rows="bf17*")).run()


def test_of_a_gguf_format_both_systems_read_the_same_file(modules, asked, tmp_path, monkeypatch):
    cells = []

    def run_limited(file: str, cell: Any, limit_bytes: Any, python: str) -> dict[str, Any]:
        cells.append((cell["runner"], cell["options"]))
        return result(cell["prompts"], 1.0, 1.0)

    monkeypatch.setattr(modules.peers, "run_limited", run_limited)
    (tmp_path / "tiny-q8_0.gguf").write_bytes(b"")
    found = modules.peers.Run(arguments(tmp_path, rounds=1, rows="GGUF Q8_0 cold 32")).run()
    file = str(tmp_path / "tiny-q8_0.gguf")
    (ours, options), (theirs, their_options) = cells
    assert (ours, theirs) == ("ours", "llama.cpp")
    assert options == {"model": file, "options": {"config_from": str(tmp_path / "tiny")}}
    assert their_options["gguf"] == file
    assert "| GGUF Q8_0 |" in modules.peers_report.table(modules.peers_report.measurements(found))


@pytest.mark.slow
def test_a_process_of_ours_measures_every_prompt(modules):
    prompts = [[1, 6, 0], [1, 4, 2], [2, 3, 2]]
    options = {"model": str(ROOT / "models" / "demo"), "options": {}}
    found = modules.peers_cell.run_cell("ours", options, prompts, list(range(30)))
    assert found["load_s"] > 0
    assert "torch" in found["about"]
    first, single, batch = found["prompts"]
    assert "decode" not in first
    assert first["s"] > 0
    assert first["activated"] > 0
    assert single["decode"]["activated"] < batch["decode"]["activated"]
    assert batch["decode"]["tok_per_s"] > 0


def test_llama_cpp_gets_every_sequence_at_its_own_positions(modules, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "fake_llama"))
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    fake = importlib.import_module("llama_cpp")
    options = {"gguf": "model.gguf", "threads": 2, "repack": True}
    found = modules.peers_cell.run_cell("llama.cpp", options, [[2, 2, 1]], list(range(6)))
    prompt, step = fake.BATCHES
    assert prompt == [(0, 0, 0, False), (1, 1, 0, True), (3, 0, 1, False), (4, 1, 1, True)]
    assert step == [(2, 2, 0, True), (5, 2, 1, True)]
    assert found["about"] == "llama-cpp-python 0, 2 threads; CPU : AVX2 = 1"
    assert "activated" not in found["prompts"][0]
