"""Matrices of experts by layer as paths of an SVG, a unit square for each cell.

Cells of one colour are one path: a page of 15,000 experts stays small. L MoE layers, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVELS = 8  # colours of a heat map, beside that of none


class StatePath(NamedTuple):
    """The experts that are in one state."""

    name: str  # of a class of the style sheet
    label: str
    num_experts: int
    path: str


STATES = {  # values of MoE.expert_states()
    3: ("used", "in memory, used by the last token"),
    2: ("device", "in memory"),
    1: ("loading", "being loaded"),
    4: ("host", "in host memory, not on the device"),
    0: ("disk", "on disk only"),
}


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
    """Of each cell 0 for none, or 1 to LEVELS; and the highest count of each level. The steps are
    smaller where counts are: most experts serve few tokens.
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
