"""How many past requests should the EAM Collection keep, and which?

    python benchmarks/policies/eamc_capacity.py ../shared/data --plot eamc_capacity.svg

Decode hit rate at 20 % by capacity, for the paper's policy and for activation-aware with all its
factors and with the EAMC factor alone. The collection begins filled from requests that are not
replayed, so large capacities are not just empty.

Then, for all three traces, without a cache: half of a request's layers are observed, and the other
half is predicted from the five nearest of the collection. How like the truth is that (cosine), and
how many of its activations go to the experts predicted highest (as many as a token takes)? Stored
by most-similar replacement, by K-means (as many clusters; needs scipy), or just the mean of all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
from kmeans import from_kmeans

from moe_infinity.errors import ConfigError
from moe_infinity.predict import sequence_predictor, tables
from moe_infinity.predict.eamc import Eamc, EamcMatch, RequestEam, row_normalised
from moe_infinity.predict.tables import FACTORS
from moe_infinity.predict.tracefile import SequenceTrace, load_trace
from moe_infinity.tools.simulator import baselines

CAPACITIES = (1, 10, 50, 100, 120, 200, 500)
KMEANS = (10, 50, 120)  # capacities at which it is compared
VARIANTS = {
    "moe-infinity-v3": ("moe-infinity-v3", []),
    "all factors": ("activation-aware", []),
    "only eamc": ("activation-aware", [f for f in FACTORS if f != "eamc"]),
}
MIXTRAL, MIXTRAL_TOP_K = "mixtral-8x7b_mmlu_seqlevel", 2
STORED, ASKED = 2000, 300  # requests of the Mixtral trace


def eam_of(sequence: SequenceTrace, num_experts: int) -> RequestEam:
    _, num_layers, _ = sequence.experts_TLK.shape
    counts = np.zeros((num_layers, num_experts), dtype=np.int64)
    for layer in range(num_layers):
        counts[layer] = np.bincount(sequence.experts_TLK[:, layer].ravel(), minlength=num_experts)
    return RequestEam(np.zeros_like(counts), counts)


def filled(eams: Sequence[RequestEam], capacity: int) -> Eamc:
    """By most-similar replacement."""
    eamc = Eamc(capacity, *eams[0].decode.shape)
    for eam in eams:
        eamc.add(eam)
    return eamc


def hit_rates(
    sequences: Sequence[SequenceTrace], num_experts: int, make: Callable[..., Eamc]
) -> dict[str, float]:
    """At 20 %, by variant, when collections begin as `make` makes them."""
    rates = {}
    with common.constants([(tables, "Eamc", make), (baselines, "Eamc", make)]):
        for label, (policy, without) in VARIANTS.items():
            cells = common.run(
                sequences, [policy], ["20%"], num_experts=num_experts, warmup=0, without=without
            )
            rates[label] = common.percent(cells[policy, "20%"])
    return rates


def others(name: str, folder: Path, sequences: Sequence[SequenceTrace], num_experts: int) -> Any:
    """EAMs of the requests that are not replayed, in random order."""
    trace = load_trace(folder / "experts.npz")
    order = np.random.default_rng(0).permutation(len(trace.sequences))
    first = common.NUM_REPORT if name == "gpt-oss" else len(sequences)
    return [eam_of(trace.sequences[i], num_experts) for i in order[first:]]


def starts_of(eams: Sequence[RequestEam]) -> dict[str, Callable[..., Eamc]]:
    """How a collection may begin."""
    starts: dict[str, Callable[..., Eamc]] = {"empty, 120": Eamc}
    for capacity in CAPACITIES:
        starts[str(capacity)] = lambda *_, n=capacity: filled(eams, n)
    for capacity in KMEANS:
        starts[f"K-means {capacity}"] = lambda *_, n=capacity: from_kmeans(eams, n)
    return starts


def by_capacity(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, folder in common.folders(args):
        sequences, num_experts = common.requests_of(name, folder, args.requests)
        conditions = common.describe(name, sequences, 0)
        eams = others(name, folder, sequences, num_experts)
        print(f"collection filled from {len(eams)} other requests")
        print(f"{'capacity':18}" + "".join(f"{variant:>17}" for variant in VARIANTS))
        for label, make in starts_of(eams).items():
            try:
                rates = hit_rates(sequences, num_experts, make)
            except ConfigError as error:
                print(f"{label}: {error}")
                continue
            print(f"{label:18}" + "".join(f"{rate:17.2f}" for rate in rates.values()))
            rows.append(
                conditions
                | {"others": len(eams), "capacity": label, "hit_rate_percent_at_20": rates}
            )
    return rows


def foretold(predict: Callable[[Any], Any], asked: Sequence[RequestEam], top_k: int) -> Any:
    """Mean cosine with the unobserved half of the layers, and share of activations covered."""
    cosines, covered = [], []
    for eam in asked:
        half = len(eam.decode) // 2
        truth = row_normalised(eam.decode)[half:]
        guess = predict(eam.decode)[half:]
        norms = np.linalg.norm(truth) * np.linalg.norm(guess)
        cosines.append(float((truth * guess).sum() / norms) if norms else 0.0)
        best = np.argsort(-guess, axis=1, kind="stable")[:, :top_k]
        covered.append(float(np.take_along_axis(truth, best, axis=1).sum(axis=1).mean()))
    return {"cosine": round(np.mean(cosines), 4), "covered": round(np.mean(covered), 4)}


def nearest(eamc: Eamc) -> Callable[[Any], Any]:
    match = EamcMatch(eamc)

    def predict(counts_LE: Any) -> Any:
        match.begin()
        for layer in range(len(counts_LE) // 2):
            experts = np.flatnonzero(counts_LE[layer])
            match.observe(layer, experts, counts_LE[layer, experts])
        return match.predict(sequence_predictor.NUM_NEAREST)

    return predict


def foretelling(name: str, eams: Sequence[RequestEam], asked: Any, top_k: int) -> dict[str, Any]:
    """The comparison for one trace."""
    mean = row_normalised(sum(row_normalised(eam.decode) for eam in eams))
    result = {
        "the truth": foretold(row_normalised, asked, top_k),
        "mean of all": foretold(lambda _: mean, asked, top_k),
    }
    for capacity in CAPACITIES:
        result[str(capacity)] = foretold(nearest(filled(eams, capacity)), asked, top_k)
    for capacity in KMEANS:
        try:
            eamc = from_kmeans(eams, capacity)
        except ConfigError as error:
            print(f"K-means: {error}")
            break
        result[f"K-means {capacity}"] = foretold(nearest(eamc), asked, top_k)
    print(f"{name}: {len(asked)} requests foretold from {len(eams)}")
    for label, numbers in result.items():
        print(f"  {label:14} cosine {numbers['cosine']:.3f}  covered {numbers['covered']:.3f}")
    return {"trace": name, "stored": len(eams), "asked": len(asked), "foretold": result}


def foretelling_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, folder in common.folders(args):
        sequences, num_experts = common.requests_of(name, folder, 40)
        eams = others(name, folder, sequences, num_experts)
        asked = [eam_of(sequence, num_experts) for sequence in sequences]
        rows.append(foretelling(name, eams, asked, sequences[0].experts_TLK.shape[2]))
    folder = args.data / "traces" / MIXTRAL
    if not (folder / "eam_counts.npz").is_file():
        print(f"skipped mixtral: {folder} has no counts")
        return rows
    counts = np.load(folder / "eam_counts.npz")["counts"].astype(np.int64)
    lines = (folder / "sequences.jsonl").read_text("utf-8").splitlines()
    tasks = np.array([json.loads(line)["task"] for line in lines])
    order = np.random.default_rng(0).permutation(len(counts))
    eams = [RequestEam(np.zeros_like(counts[0]), counts[i]) for i in order]
    asked, stored = eams[:ASKED], eams[ASKED : ASKED + STORED]
    rows.append(foretelling("mixtral", stored, asked, MIXTRAL_TOP_K))
    is_new = np.isin(tasks[order], np.unique(tasks)[::2])  # every other task: none of it is stored
    apart = [eam for eam, new in zip(eams, is_new, strict=True) if new][:ASKED]
    stored = [eam for eam, new in zip(eams, is_new, strict=True) if not new][:STORED]
    rows.append(foretelling("mixtral, other tasks", stored, apart, MIXTRAL_TOP_K))
    return rows


def plot(args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["trace"] for row in rows))
    if not names or (panels := common.figure(len(names), height=3.6)) is None:
        return
    drawn, all_axes = panels
    colours = (*map(common.COLOURS.get, ("moe-infinity-v3", "activation-aware", "lru")),)
    for name, axes in zip(names, all_axes, strict=True):
        mine = [r for r in rows if r["trace"] == name and r["capacity"].isdigit()]
        for label, colour in zip(VARIANTS, colours, strict=True):
            rates = [row["hit_rate_percent_at_20"][label] for row in mine]
            axes.plot([int(r["capacity"]) for r in mine], rates, "o-", color=colour, label=label)
        axes.set(xscale="log", xlabel="EAMs kept", ylabel="decode hit rate at 20 %, %")
        axes.set_title(common.TITLES[name])
    common.legend(drawn, all_axes[0])
    common.save(drawn, args.plot)


def main() -> None:
    args = common.parser(__doc__, requests=2).parse_args()
    rows = by_capacity(args)
    foretold_rows = foretelling_all(args)
    if args.plot:
        plot(args, rows)
    common.finish("eamc_capacity", rows, foretold=foretold_rows)


if __name__ == "__main__":
    main()
