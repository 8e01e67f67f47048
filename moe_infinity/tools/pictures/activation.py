"""What a trace activated: a heat map of experts by layer, and how few experts it was.

L MoE layers, E experts per layer, R requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_infinity.experts import Ints
from moe_infinity.predict.tables import Floats
from moe_infinity.predict.tracefile import Trace
from moe_infinity.tools.pictures.figures import figure, save, shown, title

Numbers = NDArray[Any]


def draw_activation(trace: Trace, path: Path, *, name: str) -> None:
    """Of the tokens of all requests, prompts included; `name` is the title. Raises OutputError."""
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
    for moe_layer_idx, experts_TK in enumerate(experts_TLK.transpose(1, 0, 2)):
        eam_LE[moe_layer_idx] = np.bincount(experts_TK.ravel(), minlength=shape[1])
    return eam_LE
