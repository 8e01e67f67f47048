"""Answers that are computed before their modules are called.

One call of a kernel may compute several modules of which the model calls one after the other:

    the model calls      layer 0              layer 1      layer 2
    the kernel computes  layers 0, 1 and 2    nothing      nothing
    the model is given   answer 0             answer 1     answer 2

A module takes its answer only if it is given the very tensor that was expected, with the contents
that it had. Otherwise the answer is dropped and the module's own code runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

Module = TypeVar("Module", bound=Hashable)  # or its number
Answer = TypeVar("Answer")


class TensorVersion(NamedTuple):
    """A tensor as it is now, without keeping it: of a long prompt it would take memory until the
    next one. torch counts every change in place as a new version.
    """

    x: weakref.ref[Tensor]
    version: int

    @classmethod
    def of(cls, x: Tensor) -> TensorVersion | None:
        """None for tensors of torch.inference_mode, which count no versions."""
        return None if x.is_inference() else cls(weakref.ref(x), x._version)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy is None: what is copied with it is another tensor."""
        return type(None), ()

    def is_of(self, x: Tensor) -> bool:
        """Return True if `x` is the very tensor, and was not changed since."""
        return x is self.x() and x._version == self.version


class AnsweredAhead(Generic[Module, Answer]):
    """The answers that wait for their modules to be called."""

    def __init__(self) -> None:
        self._waiting: dict[Module, tuple[TensorVersion, Answer]] = {}

    def put(self, module: Module, x: Tensor, answer: Answer) -> None:
        """Keep the answer of a module that is expected to be called with `x` as it is now."""
        version = TensorVersion.of(x)
        if version is not None:
            self._waiting[module] = version, answer

    def take(self, module: Module, x: Tensor) -> Answer | None:
        """Return the answer of a module that is called with `x`; None if it has to compute."""
        version, answer = self._waiting.pop(module, (None, None))
        return answer if version is not None and version.is_of(x) else None

    def clear(self) -> None:
        """Drop all answers: the model does something else than expected."""
        self._waiting.clear()
