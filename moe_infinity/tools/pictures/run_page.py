"""A page about one run: what the model wrote, which experts that took, and where the time went.

One file of HTML with its style, script and drawings inside: it asks for nothing from anywhere. What
comes from outside is text, which jinja2 escapes. L MoE layers, E experts per layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from numpy.typing import NDArray

from moe_infinity.cache.counters import PhaseCounters
from moe_infinity.experts import Ints, Phase
from moe_infinity.predict.eamc import RequestEam
from moe_infinity.report import Report
from moe_infinity.sizes import format_bytes
from moe_infinity.tools.pictures.figures import covered, written

LEVELS = 8  # colours of a heat map, beside that of none
STATES = {  # values of MoE.expert_states()
    3: ("used", "in memory, used by the last token"),
    2: ("device", "in memory"),
    1: ("loading", "being loaded"),
    4: ("host", "in host memory, not on the device"),
    0: ("disk", "on disk only"),
}
MOST_BARS = 240  # of the chart of steps; more steps share bars
MOST_LISTED = 12  # experts used most, of each phase


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """All that the page shows."""

    model: str
    version: str  # of this library
    options: Mapping[str, Any]
    prompt: str
    text: str
    num_generated: int  # tokens
    ttft_s: float | None
    tpot_s: float | None
    report: Report
    eam: RequestEam
    states_LE: NDArray[np.int8]  # MoE.expert_states()
    steps: Sequence[PhaseCounters]  # of decoding
    seconds: Mapping[str, float]  # of decode steps, by part


def write_page(run: FinishedRun, path: Path) -> None:
    """Write the whole page or nothing. Raises OutputError."""
    page = page_of(run).encode("utf-8", errors="replace")  # a prompt may be half a character
    with written(path) as file:
        file.write(page)


def page_of(run: FinishedRun) -> str:
    """The HTML."""
    environment = Environment(
        loader=PackageLoader("moe_infinity.tools.pictures", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["bytes"] = format_bytes
    maps = [_map_of(run.eam.of(phase), phase) for phase in Phase if run.eam.of(phase).any()]
    num_layers, num_experts = run.states_LE.shape
    return environment.get_template("run.html").render(
        run=run,
        summary=_summary_of(run),
        maps=maps,
        num_layers=num_layers,
        num_experts=num_experts,
        states=state_paths(run.states_LE),
        bars=_bars_of(run.steps),
        parts=_parts_of(run),
        phases={"prompt": run.report.prefill, "decoding": run.report.decode},
        data={
            "maps": {each["phase"]: each["counts"] for each in maps},
            "states": run.states_LE.tolist(),
        },
    )


def _summary_of(run: FinishedRun) -> dict[str, str]:
    decode = run.report.decode
    return {
        "tokens per second": "-" if not run.tpot_s else f"{1 / run.tpot_s:.1f}",
        "time to first token": "-" if run.ttft_s is None else f"{run.ttft_s:.2f} s",
        "tokens of the prompt": f"{run.report.prefill.tokens:,}",
        "tokens written": f"{run.num_generated:,}",
        "hit rate when decoding": "-" if decode.hit_rate is None else f"{decode.hit_rate:.1%}",
        "waited for experts": f"{run.report.stall_s:.2f} s",
        "experts read from disk": format_bytes(run.report.bytes_read),
        "policy": run.report.policy,
    }


def _map_of(counts_LE: Ints, phase: Phase) -> dict[str, Any]:
    """Return what the page shows of one matrix."""
    levels_LE, bounds = levels_of(counts_LE)
    in_order = np.argsort(-counts_LE, axis=None, kind="stable")[:MOST_LISTED]
    most = [divmod(int(cell), counts_LE.shape[1]) for cell in in_order]
    num_half = int((covered(counts_LE) < 50).sum())  # experts that served half of it
    return {
        "phase": phase.value,
        "counts": counts_LE.tolist(),
        "paths": [path_of(levels_LE == level) for level in range(1, LEVELS + 1)],
        "bounds": bounds,
        "used": int((counts_LE > 0).sum()),
        "num_half": num_half,
        "half": f"{num_half / counts_LE.size:.1%}",
        "most": [(layer, expert, int(counts_LE[layer, expert])) for layer, expert in most],
    }


def _bars_of(steps: Sequence[PhaseCounters]) -> list[dict[str, str]]:
    """Return bars of equally many steps; shares of lookups in percent."""
    width = max(-(-len(steps) // MOST_BARS), 1)
    bars = []
    for first in range(0, len(steps), width):
        some = steps[first : first + width]
        lookups = max(sum(step.lookups for step in some), 1)
        last = first + len(some)
        bars.append(
            {
                "steps": f"{first + 1} to {last}" if len(some) > 1 else f"{last}",
                "hits": f"{100 * sum(step.hits for step in some) / lookups:.1f}",
                "late": f"{100 * sum(step.late_hits for step in some) / lookups:.1f}",
                "misses": f"{100 * sum(step.misses for step in some) / lookups:.1f}",
                "stall_ms": f"{1e3 * sum(step.stall_s for step in some) / len(some):.2f}",
            }
        )
    return bars


def _parts_of(run: FinishedRun) -> list[tuple[str, float, float]]:
    """Name, milliseconds of a decode step, percent of it."""
    total_s = sum(run.seconds.values())
    if not run.steps or total_s <= 0:
        return []
    return [
        (name, 1e3 * seconds / len(run.steps), 100 * max(seconds, 0) / total_s)
        for name, seconds in run.seconds.items()
    ]


# Matrices of experts by layer as paths of an SVG, a unit square for each cell. Cells of one colour
# are one path, so that a page of 15,000 experts stays small.


class StatePath(NamedTuple):
    """The experts that are in one state."""

    name: str  # of a class of the style sheet
    label: str
    num_experts: int
    path: str


def path_of(cells_LE: NDArray[np.bool_]) -> str:
    """Squares where it is True; neighbours in a row are one rectangle."""
    pieces = []
    for layer, row_E in enumerate(cells_LE):
        padded = np.concatenate([[False], row_E, [False]])
        begins = np.flatnonzero(padded[1:] & ~padded[:-1]).tolist()
        ends = np.flatnonzero(padded[:-1] & ~padded[1:]).tolist()
        for begin, end in zip(begins, ends, strict=True):
            width = end - begin
            pieces.append(f"M{begin} {layer}h{width}v1h-{width}z")
    return "".join(pieces)


def levels_of(counts_LE: NDArray[Any]) -> tuple[NDArray[np.int64], list[int]]:
    """Return for each cell 0 for none, or 1 to LEVELS, and the highest count of each level. The
    steps are smaller where counts are: most experts serve few tokens.
    """
    most = max(int(counts_LE.max()), 1)
    bounds = [int(most * (level / LEVELS) ** 2) for level in range(1, LEVELS + 1)]
    levels_LE = np.where(counts_LE > 0, 1 + np.searchsorted(bounds, counts_LE), 0)
    return levels_LE, bounds


def state_paths(states_LE: NDArray[np.int8]) -> list[StatePath]:
    """Only states that an expert is in."""
    return [
        StatePath(name, label, int((states_LE == state).sum()), path_of(states_LE == state))
        for state, (name, label) in STATES.items()
        if (states_LE == state).any()
    ]
