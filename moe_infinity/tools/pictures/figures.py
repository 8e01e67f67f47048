"""Figures in the house style, by matplotlib, which is imported when one is drawn.

Nothing global is changed: no pyplot, and settings hold while a figure is made or saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from moe_infinity.errors import ConfigError, OutputError
from moe_infinity.experts import Ints
from moe_infinity.output import whole_file, why_unwritable
from moe_infinity.predict.tables import Floats
from moe_infinity.predict.tracefile import Trace

FORMATS = (".svg", ".png")
STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "figure.dpi": 100,
    "font.size": 9,
    "grid.alpha": 0.3,
    "savefig.dpi": 200,
    "svg.fonttype": "none",
    "svg.hashsalt": "policies",
}
# Okabe and Ito's palette, told apart by colour-blind readers; a policy has one colour everywhere.
COLOURS = {
    "activation-aware": "#D55E00",
    "lru": "#0072B2",
    "lfu": "#56B4E9",
    "request-lfu": "#009E73",
    "neighbor": "#7F7F7F",
    "per-layer-lru": "#CC79A7",
    "counts": "#F0E442",
    "moe-infinity-v3": "#E69F00",
    "belady": "#000000",
    "clairvoyant": "#882255",
}
MARKERS = dict(zip(COLOURS, "osv^xDP*..", strict=True))
KNOWS_FUTURE = ("belady", "clairvoyant")
MOST_SHOWN = 60  # characters of a name that comes from outside


def check_picture(path: Path) -> None:
    """Say what is wrong before the long work. Raises ConfigError, OutputError."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{path}: a picture ends in {' or '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "pictures need matplotlib, which is not installed\n"
            "hint: pip install 'moe-infinity[plot]'"
        )
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raises OutputError where no file can be written."""
    if reason := why_unwritable(path):
        raise OutputError(f"{path}: {reason}")


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file that is whole or does not exist. Raises OutputError."""
    try:
        with whole_file(path) as file:
            yield file
    except OSError as error:
        raise OutputError(f"{path}: could not be written: {error.strerror or error}") from error


def figure(num_panels: int, *, height: float = 3.2) -> tuple[Any, list[Any]]:
    """A figure, and its panels side by side."""
    with _style():
        from matplotlib.figure import Figure

        drawn = Figure(figsize=(4.2 * num_panels, height), layout="constrained")
        return drawn, list(drawn.subplots(1, num_panels, squeeze=False)[0])


def save(drawn: Any, path: Path) -> None:
    """Write a figure, without the date: the same numbers give the same file. Raises OutputError."""
    kind = path.suffix.lower().removeprefix(".")
    metadata = {"Date": None} if kind == "svg" else None
    with _style(), written(path) as file:
        drawn.savefig(file, format=kind, metadata=metadata)


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a name has letters that our font lacks
        yield


def line(axes: Any, policy: str, x: Sequence[Any], y: Sequence[float], **others: Any) -> None:
    """One policy's line, in its colour."""
    style = "--" if policy in KNOWS_FUTURE else "-"
    axes.plot(
        x,
        y,
        style,
        color=COLOURS[policy],
        marker=MARKERS[policy],
        markersize=4,
        linewidth=1.3,
        label=others.pop("label", policy),
        **others,
    )


def legend(drawn: Any, axes: Any, *, columns: int = 5) -> None:
    """Below all panels, so that it covers no line."""
    handles, labels = axes.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)


def shown(name: str) -> str:
    """A name that comes from outside, without what no picture can show."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)[:MOST_SHOWN]


def title(axes: Any, text: str) -> None:
    """Set a title as it is: a dollar sign begins no formula."""
    axes.set_title(text, parse_math=False)


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
