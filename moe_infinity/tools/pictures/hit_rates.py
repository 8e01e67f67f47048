"""Hit rates of policies over capacities, from the rows of a simulation: a panel for each trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_infinity.tools.pictures.figures import (
    COLOURS,
    KNOWS_FUTURE,
    figure,
    legend,
    line,
    save,
    shown,
    title,
)

Row = Mapping[str, Any]


def draw_hit_rates(rows: Sequence[Row], path: Path) -> None:
    """Lines; bars if there is one capacity only. Of the rows of decode, unless only prompts were
    replayed. Raises OutputError.
    """
    phase = "decode" if any(row["phase"] == "decode" for row in rows) else "prefill"
    rows = [row for row in rows if row["phase"] == phase]
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    has_lines = len({row["capacity"] for row in rows}) > 1
    drawn, panels = figure(len(traces), height=3.6)
    for trace, axes in zip(traces, panels, strict=True):
        mine = [row for row in rows if row["trace"] == trace]
        (_draw_lines if has_lines else _draw_bars)(axes, mine, phase)
        title(axes, shown(_name_of(Path(trace))))
    if has_lines:
        legend(drawn, panels[0], columns=5 if len(traces) > 1 else 3)
    save(drawn, path)


def _name_of(path: Path) -> str:
    """The folder's name where all traces are called alike."""
    return path.absolute().parent.name if path.name == "experts.npz" else path.stem


def _policies(rows: Sequence[Row]) -> list[str]:
    """The best possible ones first, as they are above the others."""
    names = list(dict.fromkeys(row["policy"] for row in rows))
    return sorted(names, key=lambda name: name not in KNOWS_FUTURE)


def _draw_lines(axes: Any, rows: Sequence[Row], phase: str) -> None:
    are_shares = all(row["capacity"].strip().endswith("%") for row in rows)
    for policy in _policies(rows):
        points = sorted(
            (
                float(row["capacity"].strip().rstrip("%")) if are_shares else row["num_slots"],
                100 * row["hit_rate"],
            )
            for row in rows
            if row["policy"] == policy
        )
        places, rates = zip(*points, strict=True)
        line(axes, policy, places, rates, gid=f"policy-{policy}")
    what = "slots, % of all experts" if are_shares else "slots"
    axes.set(xlabel=what, ylabel=f"{phase} hit rate, %", ylim=(0, 100))


def _draw_bars(axes: Any, rows: Sequence[Row], phase: str) -> None:
    rate_of = {row["policy"]: 100 * row["hit_rate"] for row in rows}
    names = sorted(rate_of, key=lambda name: rate_of[name])
    bars = axes.barh(
        names, [rate_of[name] for name in names], color=[COLOURS[name] for name in names]
    )
    axes.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
    axes.grid(visible=False, axis="y")
    axes.set(xlabel=f"{phase} hit rate in %, capacity {rows[0]['capacity']}", xlim=(0, 100))
