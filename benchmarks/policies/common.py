"""What the experiments share: which requests, how they are replayed, and how results are shown.

Every experiment asks one question and is one file: `--help` says what it takes, the last line it
prints is one JSON object, and `--plot FILE` draws a figure where matplotlib is installed. Requests
are drawn by seed 0. Of the gpt-oss trace places 120 to 239 of the permutation are the *development*
requests, which hyper-parameters were chosen on; places 0 to 119 are the *report* requests.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from moe_infinity.experts import ExpertKey
from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.recorder import Recorder
from moe_infinity.predict.tracefile import SequenceTrace, load_trace
from moe_infinity.tools.pictures import figures
from moe_infinity.tools.pictures.figures import COLOURS, legend, line
from moe_infinity.tools.simulator.baselines import make_policy
from moe_infinity.tools.simulator.laboratory import num_slots_of
from moe_infinity.tools.simulator.replay import Cell, Hardware, Setup, distinct, replay
from moe_infinity.tools.simulator.schedule import interleave, steps_of

__all__ = ["COLOURS", "legend", "line"]  # for the experiments, beside what is defined here

TRACES = {"gpt-oss": "gpt-oss-20b_decode", "deepseek": "deepseek-v2-lite_esft"}
TITLES = {"gpt-oss": "gpt-oss-20b", "deepseek": "DeepSeek-V2-Lite", "demo": "demo model"}
NUM_REPORT = 120  # requests of the report part, and of the development part
UNIT = Hardware(bytes_per_s=1.0, expert_bytes=1, layer_s=1.0)  # where only hits are asked for


def parser(doc: str | None, *, requests: int, full: int | None = NUM_REPORT) -> Any:
    """The arguments that all experiments take."""
    parsed = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parsed.add_argument("data", type=Path, nargs="?", default=Path("../shared/data"))
    of = f"requests of each trace (default {requests}" + (f", all is {full})" if full else ")")
    parsed.add_argument("--requests", type=int, default=requests, help=of)
    parsed.add_argument("--plot", type=Path, metavar="FILE", help="write a figure, .svg or .png")
    parsed.add_argument("--traces", default=",".join(TRACES), help="default: %(default)s")
    return parsed


def folders(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Name and folder of the traces asked for; says so where one is not there."""
    for name in args.traces.split(","):
        if name not in TRACES:
            raise SystemExit(f"unknown trace {name!r}, expected some of: {', '.join(TRACES)}")
        folder = args.data / "traces" / TRACES[name]
        if (folder / "experts.npz").is_file():
            yield name, folder
        else:
            print(f"skipped {name}: {folder} has no trace")


def requests_of(
    name: str, folder: Path, num: int, *, part: str = "report"
) -> tuple[list[SequenceTrace], int]:
    """So many requests of one part, and experts per layer. The DeepSeek trace is too small for
    parts: all of it was looked at; in the order of the file if all are wanted.
    """
    trace = load_trace(folder / "experts.npz")
    total = len(trace.sequences)
    order = np.random.default_rng(0).permutation(total)
    if name == "gpt-oss":
        first = NUM_REPORT * (part == "development")
        order = order[first : first + min(num, NUM_REPORT)]
    else:
        order = np.arange(total) if num >= NUM_REPORT else order[:num]
    return interleave([trace.sequences[i] for i in order], 1), trace.num_experts


def describe(name: str, sequences: Sequence[SequenceTrace], warmup: int) -> dict[str, Any]:
    """The conditions, for people and for the JSON line."""
    tokens = sum(len(s.steps_T) for s in sequences)
    print(f"{TITLES[name]}: {len(sequences)} requests, {tokens} tokens, {warmup} to warm up")
    return {"trace": name, "requests": len(sequences), "tokens": tokens, "warmup": warmup}


def run(
    sequences: Sequence[SequenceTrace],
    policies: Sequence[str],
    capacities: Sequence[str],
    *,
    num_experts: int,
    warmup: int,
    prefetch: bool = False,
    hardware: Hardware = UNIT,
    without: Sequence[str] = (),
) -> dict[tuple[str, str], Cell]:
    """Every policy at every capacity, by (policy, capacity)."""
    num_layers = sequences[0].experts_TLK.shape[1]
    pairs = [(policy, capacity) for policy in policies for capacity in capacities]
    setups = [
        Setup(
            policy=policy,
            num_slots=num_slots_of(capacity, num_layers * num_experts),
            prefetch=prefetch,
            hardware=hardware,
        )
        for policy, capacity in pairs
    ]
    cells = replay(
        steps_of(sequences),
        setups,
        num_layers=num_layers,
        num_experts=num_experts,
        warmup=warmup,
        without=without,
    )
    return dict(zip(pairs, cells, strict=True))


def percent(cell: Cell) -> float:
    """The decode hit rate in percent."""
    return round(100 * (cell.counters.decode.hit_rate or 0.0), 2)


@contextmanager
def constants(changes: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """(module, name, value): other hyper-parameters for a while."""
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def finish(question: str, rows: Sequence[dict[str, Any]], **others: Any) -> None:
    """The last line."""
    print(json.dumps({"benchmark": f"policies/{question}", **others, "rows": list(rows)}))


def figure(num_panels: int, *, height: float = 3.2) -> Any:
    """Panels side by side: (figure, list of axes); None and a message without matplotlib."""
    if find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed", file=sys.stderr)
        return None
    return figures.figure(num_panels, height=height)


def save(drawn: Any, file: Path) -> None:
    figures.save(drawn, file)
    print(f"figure: {file}")


def by_request(
    sequences: Sequence[SequenceTrace], policies: Sequence[str], capacity: str, *, num_experts: int
) -> dict[str, list[float]]:
    """Decode hit rate of each request in percent, by policy; one user."""
    num_layers = sequences[0].experts_TLK.shape[1]
    recorder, predictor = Recorder(num_layers, num_experts), Predictor(num_layers, num_experts)
    keys = [
        [ExpertKey(layer, expert) for expert in range(num_experts)] for layer in range(num_layers)
    ]
    slots = num_slots_of(capacity, num_layers * num_experts)
    cells = []
    for name in policies:
        policy = make_policy(
            name, num_layers=num_layers, num_experts=num_experts, num_slots=slots, chances=predictor
        )
        setup = Setup(policy=name, num_slots=slots, prefetch=False, hardware=UNIT)
        cells.append(Cell(setup, policy, keys))
    rates: dict[str, list[float]] = {name: [] for name in policies}
    for sequence in interleave(sequences, 1):
        for recorded in steps_of([sequence]):
            predictor.begin_step(recorded.step, recorder.begin_step(recorded.step))
            for cell in cells:
                cell.policy.begin_step(recorded.step)
                cell.begin_step(recorded.step)
            for layer, experts_TK in enumerate(recorded.experts_LTK):
                predictor.observe(layer, recorder.record(layer, experts_TK))
                activated, counts = distinct(experts_TK)
                for cell in cells:
                    cell.policy.touch(layer, activated, counts)
                    cell.run_layer(layer, activated, recorded.step.phase)
        for cell in cells:
            rates[cell.setup.policy].append(percent(cell))
            cell.forget_counts()
    return rates
