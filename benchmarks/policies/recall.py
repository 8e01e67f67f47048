"""How many of the experts a token will use are predicted, and how far ahead?

    python benchmarks/policies/recall.py ../shared/data --plot recall.svg

Recall@n: the share of a token's K experts of a layer that are among the n highest-scored, n = K and
2 K. Three moments: right after a layer was routed, for the *next* token; when the step starts (its
token is known), for all layers; and after the layer before, for the layer *one ahead*. At step
start the prediction for a layer d layers ahead is the same for every d but 1: only the next layer
is refined, so distances 2, 4, 8 and 16 are the step-start prediction of those layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import common
import numpy as np

from moe_infinity.predict.predictor import Predictor
from moe_infinity.predict.recorder import Recorder
from moe_infinity.predict.tracefile import SequenceTrace
from moe_infinity.tools.simulator.schedule import steps_of

STAGES = ("next token", "step start", "one layer ahead")
DISTANCES = (1, 2, 4, 8, 16)


class Recall:
    """Sums of found experts by stage, layer and width."""

    def __init__(self, num_layers: int, top_k: int) -> None:
        self.widths = (top_k, 2 * top_k)
        self.found = np.zeros((len(STAGES), num_layers, len(self.widths)))
        self.asked = np.zeros((len(STAGES), num_layers))

    def add(self, chances_SLE: Any, experts_LK: Any) -> None:
        """One token: what each stage predicted for each layer, and what the layer used."""
        wide = self.widths[-1]
        best = np.argpartition(-chances_SLE, self.widths, axis=2)[:, :, :wide]
        is_found = (best[..., None] == experts_LK[None, :, None, :]).any(axis=3)
        for i, width in enumerate(self.widths):
            self.found[:, :, i] += is_found[:, :, :width].sum(axis=2)
        self.asked += experts_LK.shape[1]

    def of(self, stage: int, width: int, layers: slice = slice(None)) -> float:
        found = self.found[stage, layers, width].sum()
        return float(found / max(self.asked[stage, layers].sum(), 1))


def measure(
    sequences: Sequence[SequenceTrace],
    *,
    num_experts: int,
    warmup: int,
    without: Sequence[str] = (),
) -> Recall:
    """Predict and observe, token by token; requests one after the other."""
    num_layers, top_k = sequences[0].experts_TLK.shape[1:]
    recorder = Recorder(num_layers, num_experts)
    predictor = Predictor(num_layers, num_experts, without=without)
    recall = Recall(num_layers, top_k)
    next_LE = predictor.next_use_LE.copy()
    ahead_LE = next_LE.copy()
    for recorded in steps_of(sequences):
        predictor.begin_step(recorded.step, recorder.begin_step(recorded.step))
        start_LE = predictor.next_use_LE.copy()
        is_counted = recorded.num_begun > warmup and not recorded.step.begins_B[0]
        before_LE = next_LE.copy()
        for layer, experts_TK in enumerate(recorded.experts_LTK):
            ahead_LE[layer] = predictor.next_use_LE[layer]
            predictor.observe(layer, recorder.record(layer, experts_TK))
            next_LE[layer] = predictor.next_use_LE[layer]
            predictor.look_ahead(layer)
        if is_counted:
            recall.add(np.stack([before_LE, start_LE, ahead_LE]), recorded.experts_LTK[:, 0])
    return recall


def by_distance(recall: Recall, width: int) -> dict[int, float]:
    """Of the layers that lie d layers after another layer."""
    ahead = {1: recall.of(2, width, slice(1, None))}
    return ahead | {d: recall.of(1, width, slice(d, None)) for d in DISTANCES[1:]}


def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, folder in common.folders(args):
        sequences, num_experts = common.requests_of(name, folder, args.requests)
        conditions = common.describe(name, sequences, len(sequences) // 6)
        warmup = conditions["warmup"]
        recall = measure(sequences, num_experts=num_experts, warmup=warmup)
        for i, width in enumerate(recall.widths):
            stages = {s: round(recall.of(n, i), 4) for n, s in enumerate(STAGES)}
            distances = {d: round(of, 4) for d, of in by_distance(recall, i).items()}
            print(f"recall@{width:<2} of {num_experts}: {stages}")
            print(f"          by layers ahead: {distances}")
            rows.append(
                conditions | {"recall_at": width, "stages": stages, "layers_ahead": distances}
            )
    return rows


def plot(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["trace"] for row in rows))
    if not names or (panels := common.figure(len(names), height=2.8)) is None:
        return
    drawn, all_axes = panels
    for name, axes in zip(names, all_axes, strict=True):
        for offset, row in enumerate(row for row in rows if row["trace"] == name):
            places = np.arange(len(STAGES)) + (offset - 0.5) * 0.35
            colour = (common.COLOURS["lru"], common.COLOURS["activation-aware"])[offset]
            bars = axes.bar(
                places, row["stages"].values(), 0.33, color=colour, label=f"@{row['recall_at']}"
            )
            axes.bar_label(bars, fmt="%.2f", fontsize=8)
        axes.set(xticks=range(len(STAGES)), xticklabels=STAGES, ylim=(0, 1.05), ylabel="recall")
        axes.set_title(common.TITLES[name])
        axes.legend(fontsize=8, loc="upper left")
    common.save(drawn, args.plot)


def main() -> None:
    args = common.parser(__doc__, requests=40).parse_args()
    rows = rows_of(args)
    if args.plot:
        plot(args, rows)
    common.finish("recall", rows)


if __name__ == "__main__":
    main()
