"""The pictures of `--plot`: hit rates of a simulation, and what a trace activated.

L MoE layers, E experts per layer, R requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_infinity.experts import Ints
from moe_infinity.predict.tables import Floats
from moe_infinity.predict.tracefile import Trace
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

Numbers = NDArray[Any]
Row = Mapping[str, Any]


# hit rates


def draw_hit_rates(rows: Sequence[Row], path: Path) -> None:
    """Draw hit rates over capacities, a panel for each trace, or bars if there is one capacity.
    Shows decoding, unless only prompts were replayed. Raises OutputError.
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


# activation


def draw_activation(trace: Trace, path: Path, *, name: str) -> None:
    """Draw a heat map of experts by layer, and how few experts served most tokens, prompts
    included. `name` is the title. Raises OutputError.
    """
    sequences, num_experts = trace
    num_layers, top_k = sequences[0].experts_TLK.shape[1:]
    counts_RLE = np.stack(
        [
            matrix_of(each.experts_TLK.astype(np.int64), (num_layers, num_experts))
            for each in sequences
        ]
    )
    num_tokens = sum(len(each.steps_T) for each in sequences)
    drawn, (left, right) = figure(2, height=3.6)
    _draw_map(drawn, left, 100 * counts_RLE.sum(axis=0) / num_tokens)
    title(left, f"{shown(name)}: {len(sequences)} requests, {num_tokens:,} tokens")
    _draw_concentration(right, counts_RLE)
    save(drawn, path)


def _draw_map(drawn: Any, axes: Any, percent_LE: Numbers) -> None:
    image = axes.imshow(percent_LE, aspect="auto", interpolation="nearest", vmin=0, cmap="viridis")
    axes.grid(visible=False)
    axes.set(xlabel="expert", ylabel="MoE layer")
    drawn.colorbar(image, ax=axes, label="tokens that it served, %")


def _draw_concentration(axes: Any, counts_RLE: Numbers) -> None:
    total_LE = counts_RLE.sum(axis=0)
    share_of_experts = 100 * np.arange(total_LE.size + 1) / total_LE.size
    curves = np.stack([covered(counts_LE) for counts_LE in counts_RLE])
    axes.plot(
        share_of_experts, curves.mean(axis=0), color="#D55E00", label="one request, on average"
    )
    axes.plot(share_of_experts, covered(total_LE), color="#0072B2", label="all requests")
    axes.plot([0, 100], [0, 100], "--", color="black", linewidth=0.8, label="all experts alike")
    axes.set(
        xlabel="experts used most, % of all", ylabel="activations that they served, %",
        xlim=(0, 100), ylim=(0, 100),
    )  # fmt: skip
    title(axes, "how concentrated it is")
    axes.legend(loc="lower right", fontsize=8)


def covered(counts_LE: Numbers) -> Numbers:
    """[L x E + 1]: the percentage of all activations that the n experts used most served, for n
    from none to all.
    """
    in_order = np.sort(counts_LE, axis=None)[::-1].astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(in_order)])
    shares: Numbers = 100 * sums / max(sums[-1], 1.0)
    return shares


def matrix_of(experts_TLK: Ints, shape: tuple[int, ...]) -> Floats:
    """[L, E]: how many tokens each expert served."""
    eam_LE = np.zeros(shape, dtype=np.float32)
    for moe_layer_idx, top_k_index_TK in enumerate(experts_TLK.transpose(1, 0, 2)):
        eam_LE[moe_layer_idx] = np.bincount(top_k_index_TK.ravel(), minlength=shape[1])
    return eam_LE
