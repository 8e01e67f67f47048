"""One architecture: a tiny model as stock transformers runs it against the same checkpoint with few
expert slots, and against the same with wrong experts, which must not pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_infinity import MoE, MoEInfinityError, UnsupportedModelError
from tests.on_demand import ON_DEMAND
from tests.sweep import tiny
from tests.sweep.discover import Architecture, architectures_in, modelling_files
from tests.sweep.overrides import NOT_COMPARED, TOLERANCES, UNSEEN_LAYERS
from tests.sweep.runners import Outcome, outcome

BUDGET = "12.5%"  # of all experts: as many slots as there are MoE layers
EXPERTS_CLASS = re.compile(r"(?<!Parallel)(?<!InklingShared)Experts$|JetMoeMoE|DogeCDMoE|NaiveMoe")


@dataclass(frozen=True)
class Row:
    """What the sweep found out about one class."""

    model_type: str
    model_class: str
    experts_class: str
    result: str  # bitwise, tolerance, or what is in the way
    reason: str = ""

    @property
    def is_supported(self) -> bool:
        return self.result in ("bitwise", "tolerance")


def difference(ours: Outcome, theirs: Outcome, tolerance: float) -> str:
    """In words what differs by more than `tolerance` times the largest logit; empty if nothing."""
    found = []
    for name, expected in theirs.items():
        if ours[name].shape != expected.shape:
            found.append(f"{name} has shape {list(ours[name].shape)}")
        elif not torch.equal(ours[name], expected):
            largest = (ours[name] - expected).abs().max().item()
            if not largest <= tolerance * expected.abs().max().item():
                found.append(f"{name} by {largest:.1e}")
    return ", ".join(found)


class Watched:
    """The recipes of one MoE layer that remember which experts were loaded, and can give one for
    another."""

    def __init__(self, recipes: Any) -> None:
        self._recipes = recipes
        self.loaded: dict[int, None] = {}  # in order
        self.instead: dict[int, int] = {}

    def load(self, expert_idx: int, *args: Any) -> None:
        self.loaded[expert_idx] = None
        self._recipes.load(self.instead.get(expert_idx, expert_idx), *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recipes, name)


@contextmanager
def watched(folder: Path) -> Iterator[tuple[MoE, list[Watched]]]:
    """The checkpoint with few slots, and its recipes by MoE layer. Only what layers ask for is
    loaded, so that it says which experts they use.
    """
    with MoE(folder, host_memory=BUDGET, exact=True, **ON_DEMAND) as moe:
        recipes = moe.engine.loader.recipes
        layers = [Watched(of_layer) for of_layer in recipes]
        recipes[:] = layers  # type: ignore[assignment]
        yield moe, layers


def run_offloaded(folder: Path, stock: Any) -> tuple[Outcome, list[list[int]]]:
    """The outcome with few slots, and the experts that were loaded, by MoE layer. Asserts that the
    experts were really elsewhere."""
    with watched(folder) as (moe, layers):
        found = outcome(moe.model, moe.generate)
        moe.check_invariants()
        report = moe.report()
        assert report.evictions > 0, report
        by_layer = zip(moe.engine.bookkeeping.keys, layers, strict=True)
        own = {id(w._recipes): len(keys) * param_bytes(w) for keys, w in by_layer}  # tied ones once
        assert num_bytes(moe.model) <= num_bytes(stock) - sum(own.values())
        return found, [list(layer.loaded) for layer in layers]


def param_bytes(recipes: Any) -> int:
    """Of one expert, as its class has it."""
    return sum(spec.num_bytes for recipe in recipes.recipes for spec in recipe.targets.values())


def num_bytes(model: Any) -> int:
    return sum(param.nbytes for param in model.parameters() if param.device.type != "meta")


def layers_that_do_not_matter(
    folder: Path, theirs: Outcome, loaded: list[list[int]], tolerance: float
) -> list[int]:
    """MoE layers of which two experts can change places and the comparison still passes."""
    unnoticed = []
    for moe_layer_idx, experts in enumerate(loaded):
        if not experts:
            continue  # of another modality
        first, second = experts[0], (experts + [(experts[0] + 1) % tiny.NUM_EXPERTS_EACH])[1]
        with watched(folder) as (moe, layers):
            layers[moe_layer_idx].instead = {first: second, second: first}
            if not difference(outcome(moe.model, moe.generate), theirs, tolerance):
                unnoticed.append(moe_layer_idx)
    return unnoticed


def experts_classes(model: Any) -> str:
    """Names of the classes of routed experts, in model order."""
    names = {type(module).__name__: None for module in model.modules()}
    return ", ".join(name for name in names if EXPERTS_CLASS.search(name))


def in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def compare(architecture: Architecture, folder: Path) -> Row:
    """The row of one class; `folder` is empty and will hold its checkpoint."""
    name = architecture.name
    row = Row(architecture.model_type, name, "", "")

    def give(result: str, reason: str = "") -> Row:
        return Row(row.model_type, name, experts, result, reason)

    experts = ""
    try:
        model = tiny.tiny_model(architecture)
        experts = experts_classes(model)
        if name in NOT_COMPARED:
            return give(*NOT_COMPARED[name])
        model.save_pretrained(folder)
        stock = architecture.model_class.from_pretrained(folder, dtype="auto")
        theirs = outcome(stock, stock.generate)
    except Exception as error:  # whatever a new architecture comes up with becomes its row
        if name in NOT_COMPARED:
            return give(*NOT_COMPARED[name])
        return give("cannot be built", in_a_line(error))
    if not all(values.isfinite().all() for values in theirs.values()):
        return give("cannot be built", "its tiny model gives infinities or NaN")
    tolerance, reason = TOLERANCES.get(name, (0.0, ""))
    try:
        ours, loaded = run_offloaded(folder, stock)
        differs = difference(ours, theirs, tolerance)
        if differs:
            return give("differs", differs)
        unnoticed = layers_that_do_not_matter(folder, theirs, loaded, tolerance)
    except UnsupportedModelError as error:
        return give("refused", in_a_line(error))
    except MoEInfinityError as error:
        return give("fails", in_a_line(error))
    if unnoticed != UNSEEN_LAYERS.get(name, []):
        return give("not tested", f"swapped experts go unnoticed in MoE layers {unnoticed}")
    if not tolerance or not difference(ours, theirs, 0.0):
        num_idle = sum(not experts_of_layer for experts_of_layer in loaded)
        reason = f"{num_idle} of {len(loaded)} MoE layers did not run" if num_idle else ""
        return give("bitwise", reason)
    return give("tolerance", reason)


def rows_of(folder: str, scratch: Path) -> list[Row]:
    """The rows of one folder of transformers' models; checkpoints are made in `scratch`."""
    rows = [compare(found, scratch / found.name) for found in architectures_in(folder)]
    if rows:
        return rows
    reason = "nothing in its modelling file can generate"
    return [Row(name, "", "", "not generating", reason) for name in modelling_files()[folder]]
