"""Figures in the house style, by matplotlib, which is imported when one is drawn.

Nothing global is changed: no pyplot, and settings hold while a figure is made or saved.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from moe_infinity.errors import ConfigError, OutputError
from moe_infinity.output import whole_file, why_unwritable

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
    """As it is: a dollar sign begins no formula."""
    axes.set_title(text, parse_math=False)
