"""Compare systems on one GGUF file, for peers.py: the same ids, in turn, in the same memory group.

    python tools/make_random_gguf.py qwen3-30b-a3b runs/q.gguf
    python benchmarks/peers.py runs/q.gguf --limits 12GiB,8GiB --pythons VENV/bin/python

A process loads the file, computes a prompt and decodes. What cannot run says why. --out is written
after each process; the same command goes on where it was cut.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from limits import drop_from_page_cache, run_limited
from peers_systems import LEFT_OUT, SYSTEMS, Request, System, interpreters

from moe_infinity.gguf.file import read_gguf
from moe_infinity.sizes import parse_size

sys.path.append(str(Path(__file__).resolve().parents[1]))  # if this is run as a script

from tools.random_weights import topical_ids

CELL = str(Path(__file__).with_name("peers_cell.py"))
READ_BYTES = 16 << 20
# From when the page cache drops the file until a system starts. A virtual machine gives the freed
# memory back to its host meanwhile, and a system that starts sooner is faster: llama.cpp read 18.6
# GB and computed 32 tokens in 13 s, and in 23 s after this wait.
SETTLED_S = 15.0
Results = dict[str, list[dict[str, Any]]]  # by row and system, one a round


class Row(NamedTuple):
    """How a process begins, and what it gets."""

    limit: str | None  # of memory; None: all, and the file is in the page cache
    num_tokens: int

    @property
    def name(self) -> str:
        return f"{f'limit {self.limit}' if self.limit else 'cached'}, {self.num_tokens} tokens"


def rows(limits: list[str], lengths: list[int]) -> list[Row]:
    return [Row(limit, length) for limit, length in product([None, *limits], lengths)]


def chosen(names: str) -> list[System]:
    """The systems of a comma-separated list of names. Raises SystemExit."""
    known = {system.name: system for system in SYSTEMS}
    asked = [name.strip() for name in names.split(",")] if names else list(known)
    if unknown := sorted(set(asked) - known.keys()):
        raise SystemExit(f"no system {unknown[0]!r}, expected some of: {', '.join(known)}")
    return [known[name] for name in asked]


def in_turn(systems: list[System], round_idx: int) -> Iterator[System]:
    """Another system is the first in each round."""
    first = round_idx % len(systems)
    yield from systems[first:] + systems[:first]


def read_into_page_cache(file: Path) -> None:
    with file.open("rb", buffering=0) as stream:
        while stream.read(READ_BYTES):
            pass


def run_cell(system: System, row: Row, args: argparse.Namespace, python: str) -> dict[str, Any]:
    """What one process printed, and how long it took."""
    limit_bytes = parse_size(row.limit, whole_bytes=0) if row.limit else None
    length = row.num_tokens + args.decode
    threads = len(os.sched_getaffinity(0))
    config_from = str(args.config) if args.config else None
    request = Request(str(args.model), threads, length + 1, limit_bytes, config_from)
    vocab_size = len(read_gguf(args.model).vocabulary.tokens)
    drop_from_page_cache(args.model)
    if limit_bytes is None:
        read_into_page_cache(args.model)
    else:
        time.sleep(SETTLED_S)
    asked = {
        "runner": system.runner,
        "options": system.options(request),
        "prompts": [[1, row.num_tokens, args.decode]],
        "ids": topical_ids(length, vocab_size),
    }
    started = time.perf_counter()
    result = run_limited(CELL, asked, limit_bytes, python, args.timeout)
    return result | {"wall_s": time.perf_counter() - started}


def run(args: argparse.Namespace) -> Results:
    found: Results = json.loads(args.out.read_text("utf-8")) if args.out.exists() else {}
    systems = chosen(args.systems)
    pythons = interpreters(args.pythons.split(",") if args.pythons else [])
    lengths = [int(length) for length in args.prompts.split(",")]
    limits = args.limits.split(",") if args.limits else []
    for system in systems:
        if system.name == "ours" and not found:  # compiles kernels, as a first start does
            run_cell(system, Row(None, min(max(lengths), 128)), args, sys.executable)
    for round_idx, row in product(range(args.rounds), rows(limits, lengths)):
        for system in in_turn(systems, round_idx):
            cell = found.setdefault(f"{row.name} | {system.name}", [])
            if len(cell) > round_idx:
                continue
            python = pythons.get(system.module)
            missing = {"failed": f"no interpreter can import {system.module}"}
            cell.append(missing if python is None else run_cell(system, row, args, python))
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1))
            said = cell[-1].get("failed", f"done in {cell[-1].get('wall_s', 0):.0f} s")
            print(f"round {round_idx + 1}, {row.name}, {system.name}: {said}", file=sys.stderr)
    return found


def table(found: Results) -> str:
    """Medians by row and system: first token with loading, decoding, megabytes read per token."""
    lines = ["| row | system | load + prompt, s | prompt, s | decode, tok/s | read, MB/token |"]
    lines.append("|---|---|---|---|---|---|")
    for key, cell in found.items():
        good = [each for each in cell if "failed" not in each]
        if not good:
            lines.append(f"| {key} | {cell[0]['failed']} | | | |")
            continue
        prompts = [each["prompts"][0] for each in good]
        first = median(each["load_s"] + each["prompts"][0]["s"] for each in good)
        prompt = median(each["s"] for each in prompts)
        rate = median(each["decode"]["tok_per_s"] for each in prompts)
        read = median(each["decode"]["read_bytes"] for each in prompts) / 1e6
        lines.append(f"| {key} | {first:.3g} | {prompt:.3g} | {rate:.3g} | {read:.3g} |")
    left_out = [f"{name}: {why}." for name, why in LEFT_OUT.items()]
    return "\n".join([*lines, "", "Left out:", *left_out])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path, help="GGUF file")
    parser.add_argument("--out", type=Path, default=Path("runs/peers_file.json"))
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--limits", default="12GiB,8GiB", help="of memory; default: %(default)s")
    parser.add_argument("--prompts", default="32,512", help="tokens; default: %(default)s")
    parser.add_argument("--decode", type=int, default=32, help="tokens; default: %(default)s")
    parser.add_argument("--systems", default="", help="comma-separated; default: all")
    parser.add_argument("--pythons", default="", help="interpreters that have other systems")
    parser.add_argument("--timeout", type=float, default=900, help="seconds of a process")
    parser.add_argument("--config", type=Path, help="folder, if the file does not say all of it")
    print(table(run(parser.parse_args())))


if __name__ == "__main__":
    main()
