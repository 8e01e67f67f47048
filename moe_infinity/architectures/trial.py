"""Found by trying: a kernel takes the place of a module only if both compute the same.

No class is known by its name. When a model is loaded, one module of each kind runs its own code on
random numbers, in float32, and so does each candidate for its place.

    find_gate(router)  ->  verdict(search)  ->  Found(gate)        the first candidate that agrees
                                                FellBack(reason)   the module's own code runs

A search is a function of no arguments. It makes a Trial, returns the candidate that agrees, and
raises Differs if none does. `verdict` runs it, and is the only place that catches what a module may
raise when it is called with random numbers.

    def search() -> Gate:
        trial = Trial(router, seed=2)
        x = trial.random(32, width)
        wanted = trial.module(x)
        return first_that(GATES, lambda gate: is_close(gate(x), wanted), "it weighs in another way")
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from moe_infinity.report import PathTaken

TOLERANCE = 2e-5  # of the largest number: float32, summed in another order

logger = logging.getLogger(__name__)

Candidate = TypeVar("Candidate")


@dataclass(frozen=True, slots=True)
class Found(Generic[Candidate]):
    """A candidate computes what the module computes."""

    path: Candidate


@dataclass(frozen=True, slots=True)
class FellBack:
    """No candidate does, so the module's own code runs."""

    reason: str
    has_run: bool = False  # the module's code ran to its end, and gave something else


Verdict = Found[Candidate] | FellBack


class Differs(Exception):
    """A search found no candidate that agrees. The message names what differs."""


class Trial:
    """A copy of a module in float32 on the CPU, without hooks, and random numbers to run it on."""

    def __init__(
        self, module: nn.Module, *, seed: int, stubs: Mapping[str, nn.Module] | None = None
    ) -> None:
        """`stubs` take the places of children with these names, which are not copied."""
        self._generator = torch.Generator().manual_seed(seed)
        if stubs is None:
            self.module: Any = in_float32(module)
        else:
            self.module = copy.copy(module)
            self.module._modules = {
                name: stubs[name] if name in stubs else in_float32(child)
                for name, child in module.named_children()
            }

    def random(self, *shape: int) -> Tensor:
        """Return normally distributed numbers in float32. A seed gives the same ones each time."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")


def verdict(search: Callable[[], Candidate]) -> Verdict[Candidate]:
    """Run a search without gradients. Whatever it raises means that the module's own code stays."""
    try:
        with torch.no_grad():
            return Found(search())
    except Differs as difference:
        return FellBack(str(difference), has_run=True)
    except Exception as error:  # the module wants other arguments, shapes or types than a trial has
        logger.debug("a trial ended early", exc_info=True)
        first_line = str(error).partition("\n")[0]
        return FellBack(f"on trial it raised {type(error).__name__}: {first_line}")


def first_found(verdicts: Iterable[Verdict[Candidate]]) -> Verdict[Candidate]:
    """Return the first verdict that is Found. If there is none, return the one that says most: of a
    module whose code ran to its end, otherwise the first.
    """
    fell_back = []
    for each in verdicts:
        if isinstance(each, Found):
            return each
        fell_back.append(each)
    return next((each for each in fell_back if each.has_run), fell_back[0])


def first_that(
    candidates: Iterable[Candidate], agrees: Callable[[Candidate], bool], reason: str
) -> Candidate:
    """Return the first candidate that agrees. Raises Differs with the reason if none does."""
    for candidate in candidates:
        if agrees(candidate):
            return candidate
    raise Differs(reason)


def path_taken(kind: str, module: nn.Module, verdict: Verdict[Any]) -> PathTaken:
    """Return what the report says of a module with this verdict."""
    reason = verdict.reason if isinstance(verdict, FellBack) else None
    return PathTaken(kind, type(module).__name__, reason)


def for_trial(module: nn.Module) -> Any:
    """Return a copy on the CPU, of the module's own dtype, without hooks: a trial is no call that
    a hook has to see.
    """
    hooks = [h for m in module.modules() for h in (m._forward_hooks, m._forward_pre_hooks)]
    nothing: dict[int, Any] = {id(of_module): type(of_module)() for of_module in hooks}
    return copy.deepcopy(module, nothing).cpu()


def in_float32(module: nn.Module) -> Any:
    """Return a copy for a trial in float32."""
    return for_trial(module).float()


def is_close(given: Tensor, wanted: Tensor) -> bool:
    """Return True if two ways to compute in float32 gave the same; False if any number is NaN."""
    is_alike = given.shape == wanted.shape
    return is_alike and bool((given - wanted).abs().max() <= TOLERANCE * wanted.abs().max())
