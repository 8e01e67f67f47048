"""How fast are we and llama.cpp with the same weights and the same token ids?

    python tools/make_random_checkpoint.py runs/big --layers 7 --experts 128 --hidden 2048 \\
        --heads 32 --head-dim 128 --tokenizer models/demo                            # 8.8 GB
    python benchmarks/peers.py runs/big --out runs/peers.json     # needs gguf, llama-cpp-python
    python benchmarks/peers.py --report runs/peers.json --csv docs/plots/performance.csv
    python benchmarks/peers.py runs/real.gguf        # more systems on one file: peers_file.py

Beside the model it makes what is missing: runs/big.gguf, and the packed folders and quantized
files of 8 and 4 bits. That takes 3.5 times the model's size on disk.

Every process has one system (ours, ours exact, llama.cpp) and one format, and begins with all files
out of the page cache, or with its own read into it. Under a memory limit it has a memory cgroup.
Systems alternate, and the order moves on with every round. --out is written after every process:
the same command goes on where it was cut. A row of --rows is a pattern such as 'bf16 cold*'.

docs/performance.md says how each value is measured and bounded; peers_report.py fills its table.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import peers_file
import torch
from copy_bandwidth import disk_bandwidth, memory_bandwidth, sequential_bandwidth
from decode import TEXT
from limits import drop_from_page_cache, run_limited
from peers_cell import Prompt
from peers_plan import (
    EXACT,
    FORMATS,
    LLAMA_CPP,
    NUM_SEQUENCES,
    OURS,
    Format,
    Rates,
    Scenario,
    Sizes,
    estimated_s,
    key_of,
    num_ids,
    scenarios,
    sizes_of_gguf,
    sizes_of_ours,
    systems_of,
)
from peers_report import conditions, measurements, table, write_csv

from moe_infinity.cli.inspection import inspect_checkpoint
from moe_infinity.sizes import parse_size
from moe_infinity.system.machine import machine_memory_bytes

TOOLS = Path(__file__).resolve().parents[1] / "tools"
CELL = str(Path(__file__).with_name("peers_cell.py"))
TOKENS, ROWS, COLUMNS = 600, 1536, 2048  # of the measured product
PRODUCTS_S = 1.0
READ_BYTES = 16 << 20


class Cell(NamedTuple):
    form: Format
    scenario: Scenario
    system: str
    options: dict[str, Any]

    @property
    def key(self) -> str:
        return key_of(self.form, self.scenario, self.system)

    def path(self, model: Path) -> Path:
        is_theirs = self.system == LLAMA_CPP
        return self.form.file(model) if is_theirs else self.form.folder(model)


class Results:
    """The file of results: conditions, rates of each round, and what every process printed."""

    def __init__(self, file: Path, about: dict[str, Any]) -> None:
        self._file = file
        self.found: dict[str, Any] = {"about": about, "sizes": {}, "rates": [], "cells": {}}
        if file.exists():
            self.found = json.loads(file.read_text("utf-8"))
            if self.found["about"] != about:
                raise SystemExit(f"{file} has results of another model, text or machine")

    def of(self, cell: Cell) -> list[dict[str, Any]]:
        """By round."""
        found: list[dict[str, Any]] = self.found["cells"].get(cell.key, [])
        return found

    def add(self, cell: Cell, result: dict[str, Any]) -> None:
        """And write at once: a run that is cut leaves the file before, or the file after."""
        self.found["cells"].setdefault(cell.key, []).append(result)
        temporary = self._file.with_name(self._file.name + ".partial")
        temporary.write_text(json.dumps(self.found, indent=1))
        temporary.replace(self._file)


# files


def make_files(model: Path, form: Format, llama_python: str) -> None:
    """Those of a format that are missing; a name is complete or missing."""
    folder, file = form.folder(model), form.file(model)
    if form.packed and not folder.exists():
        # The rounding does not change the speed of what is packed; "nearest" takes less time.
        options = ["--experts", form.packed, "--rounding", "nearest", "--output", str(folder)]
        call(sys.executable, "-m", "moe_infinity", "pack", str(model), *options)
    if form.gguf and not file.exists():
        make_files(model, FORMATS[0], llama_python)
    if not file.exists():
        partial = file.with_name(file.name + ".partial")
        if form.gguf is None:
            call(sys.executable, str(TOOLS / "convert_to_gguf.py"), str(model), str(partial))
        else:
            source = str(FORMATS[0].file(model))
            call(llama_python, str(TOOLS / "quantize_gguf.py"), source, str(partial), form.gguf)
        partial.replace(file)


def call(*command: str) -> None:
    print("$", *command, file=sys.stderr)
    if status := subprocess.run(command).returncode:
        raise SystemExit(f"exit status {status}")


def require_llama_cpp(python: str) -> None:
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode:
        raise SystemExit(f"{python} cannot import llama_cpp: name one that can as --llama-python")


def read_into_page_cache(path: Path) -> None:
    for file in path.iterdir() if path.is_dir() else [path]:
        with file.open("rb", buffering=0) as stream:
            while stream.read(READ_BYTES):
                pass


# conditions


def token_ids(model: Path) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(TEXT.read_text("utf-8")).ids[: num_ids()]
    if len(ids) < num_ids():
        raise SystemExit(f"{TEXT.name} has {len(ids)} tokens, needed are {num_ids()}")
    return ids


def about(model: Path, config: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """What may not change between two parts of a run."""
    cpu = next(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return {
        "model": model.name,
        "config": config,
        "text": zlib.crc32(json.dumps(ids).encode()),
        "machine": {"cpu": cpu, "cores": num_cores(), "memory_bytes": machine_memory_bytes()},
    }


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def busy_s() -> float:
    """Seconds in which cores worked, those of our own processes left out, since some moment."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split()[1:9])
    busy = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy - sum(usage.ru_utime + usage.ru_stime for usage in own)


def products_per_s(dtype: torch.dtype) -> float:
    """Floating-point operations per second of torch's matrix product, of a prompt's size."""
    x, weight = torch.ones(TOKENS, COLUMNS, dtype=dtype), torch.ones(ROWS, COLUMNS, dtype=dtype)
    torch.nn.functional.linear(x, weight)
    started, done = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < PRODUCTS_S:
        torch.nn.functional.linear(x, weight)
        done += 1
    return 2.0 * TOKENS * ROWS * COLUMNS * done / passed


def rates_now(model: Path) -> Rates:
    drop_from_page_cache(model)
    return Rates(
        disk_random=disk_bandwidth(model, inspect_checkpoint(str(model)).bytes_per_expert),
        disk_sequential=sequential_bandwidth(model),
        memory=memory_bandwidth(num_cores()),
        products_bf16=products_per_s(torch.bfloat16),
        products_float32=products_per_s(torch.float32),
    )


# the run


def cells_of(limits: list[str], rows: list[str], round_idx: int) -> Iterator[Cell]:
    """In the order of a round: systems of one format and scenario follow each other."""
    for scenario, form in product(scenarios(limits), FORMATS):
        if any(fnmatch(f"{form.name} {scenario.name}", row) for row in rows):
            systems = list(systems_of(scenario, form).items())
            first = round_idx % len(systems)
            for system, options in systems[first:] + systems[:first]:
                yield Cell(form, scenario, system, options)


class Run:
    """All processes of a run, one after another."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._model, self._python = args.model, args.llama_python
        self._config = json.loads((args.model / "config.json").read_text("utf-8"))
        self._ids = token_ids(args.model)
        self._results = Results(args.out, about(args.model, self._config, self._ids))
        self._sizes: dict[tuple[str, bool], Sizes] = {}  # by format, and whether of llama.cpp
        self._rounds = [
            list(cells_of(args.limits.split(","), args.rows.split(","), round_idx))
            for round_idx in range(args.rounds)
        ]

    def run(self) -> dict[str, Any]:
        formats = dict.fromkeys(cell.form for cells in self._rounds for cell in cells)
        if not formats:
            raise SystemExit("no row has such a name; names are 'bf16 cold 32', '4-bit warm', ...")
        require_llama_cpp(self._python)
        for form in formats:
            make_files(self._model, form, self._python)
            self._measure_sizes(form)
        missing = [self._missing(round_idx) for round_idx in range(len(self._rounds))]
        if any(missing):
            self._print_estimate([cell for cells in missing for cell in cells])
            self._compile_kernels([cell for cells in missing for cell in cells])
        for round_idx, cells in enumerate(missing):
            self._run_round(round_idx, cells)
        return self._results.found

    def _measure_sizes(self, form: Format) -> None:
        ours = sizes_of_ours(self._model, form, self._config)
        theirs = sizes_of_gguf(form.file(self._model), self._config)
        self._sizes |= {(form.name, False): ours, (form.name, True): theirs}
        self._results.found["sizes"][form.name] = {OURS: asdict(ours), LLAMA_CPP: asdict(theirs)}

    def _missing(self, round_idx: int) -> list[Cell]:
        cells = self._rounds[round_idx]
        return [cell for cell in cells if len(self._results.of(cell)) <= round_idx]

    def _print_estimate(self, cells: list[Cell]) -> None:
        rates = rates_now(self._model)
        seconds = sum(self._estimated_s(cell, rates) for cell in cells)
        print(f"{len(cells)} processes, about {seconds / 3600:.1f} hours", file=sys.stderr)

    def _estimated_s(self, cell: Cell, rates: Rates) -> float:
        """As long as earlier rounds took, if there are any."""
        if walls := [found["wall_s"] for found in self._results.of(cell)]:
            return median(walls)
        sizes = self._sizes[cell.form.name, cell.system == LLAMA_CPP]
        return estimated_s(cell.scenario, sizes, self._config, rates)

    def _compile_kernels(self, cells: list[Cell]) -> None:
        """As a first start does, for every format and way of computing."""
        prompts = (Prompt(1, 600, 2), Prompt(NUM_SEQUENCES, 32, 2))
        for form, system, options in dict.fromkeys(
            (cell.form, cell.system, json.dumps(cell.options))
            for cell in cells
            if cell.system in (OURS, EXACT)
        ):
            print(f"compiling kernels: {form.name} {system}", file=sys.stderr)
            self._run_cell(
                Cell(form, Scenario("first start", prompts), system, json.loads(options))
            )

    def _run_round(self, round_idx: int, cells: list[Cell]) -> None:
        if cells:
            self._results.found["rates"].append(asdict(rates_now(self._model)))
        for cell in cells:
            result = self._run_cell(cell)
            self._results.add(cell, result)
            said = result.get("failed", "done")
            took = f"{result['wall_s']:.0f} s"
            print(f"round {round_idx + 1}, {cell.key}: {said} in {took}", file=sys.stderr)

    def _run_cell(self, cell: Cell) -> dict[str, Any]:
        started = time.perf_counter()
        for form, path in product(FORMATS, (Format.folder, Format.file)):
            if path(form, self._model).exists():
                drop_from_page_cache(path(form, self._model))
        path = cell.path(self._model)
        if cell.scenario.is_cached:
            read_into_page_cache(path)
        limit = cell.scenario.limit
        limit_bytes = parse_size(limit, whole_bytes=0) if limit else None
        if cell.system == LLAMA_CPP:
            # Repacked weights are a copy in memory that cannot be dropped as the file can.
            repack = limit_bytes is None or path.stat().st_size < limit_bytes
            options = {"gguf": str(path), "threads": num_cores(), "repack": repack}
            asked, python = {"runner": "llama.cpp", "options": options}, self._python
        else:
            more = {"config_from": str(self._model)} if cell.form.is_same_file else {}
            options = {"model": str(path), "options": cell.options | more}
            asked, python = {"runner": "ours", "options": options}, sys.executable
        asked |= {"prompts": cell.scenario.prompts, "ids": self._ids}
        began = busy_s(), time.perf_counter()
        result = run_limited(CELL, asked, limit_bytes, python)
        busy, took = busy_s() - began[0], time.perf_counter() - began[1]
        return result | {"others_cores": busy / took, "wall_s": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="folder of a Qwen3-MoE in bf16")
    parser.add_argument("--out", type=Path, default=Path("runs/peers.json"), help="%(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--rows", default="*", help="patterns, comma-separated: 'bf16 cold*'")
    parser.add_argument("--limits", default="4GiB,2GiB", help="default: %(default)s")
    parser.add_argument(
        "--llama-python", default=sys.executable, help="interpreter that has llama_cpp"
    )
    parser.add_argument("--report", type=Path, help="show these results, measure nothing")
    parser.add_argument("--csv", type=Path, help="write medians and spreads into this file")
    args = parser.parse_args()
    if (args.model is None) == (args.report is None):
        parser.error("give a model to measure, or --report FILE")
    found = json.loads(args.report.read_text("utf-8")) if args.report else Run(args).run()
    lines = measurements(found)
    if args.csv:
        write_csv(lines, args.csv)
    print(f"{conditions(found)}\n\n{table(lines)}")
    ratios = {
        f"{line['format']}, {line['what']}": float(line["times llama.cpp"])
        for line in lines
        if line["system"] == OURS and line["times llama.cpp"]
    }
    print(json.dumps({"benchmark": "peers", "times_llama_cpp": ratios}))


if __name__ == "__main__":
    try:
        peers_file.main() if sys.argv[1:2] and sys.argv[1].endswith(".gguf") else main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from here") from None
