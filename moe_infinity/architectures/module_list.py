"""Experts that are an nn.ModuleList or nn.ModuleDict of MLPs, called one by one by code that is not
known, as in models that bring their own (trust_remote_code).

The block around them runs twice. In the first run an expert only notes what it is called with, and
returns zeros. Then all experts that were called are loaded and computed, several at a time and in
whatever order they arrive. In the second run an expert returns what was computed for it. So the
result is that of the block's own arithmetic. Its router and shared experts are computed twice; a
block that counts its calls would count double. An expert has to return one tensor of the shape of
its first argument.

The experts of each token are taken from the block's call of torch.topk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_infinity.architectures.adapters import ExpertsModule, MoeLayer, without_gradient
from moe_infinity.architectures.module_state import CHANGES_NOTHING
from moe_infinity.architectures.outside_interface import OneModuleEach
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.experts import Routing


@dataclass(slots=True)
class Call:
    """One call of one expert by its block, and its answer."""

    expert_idx: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: Tensor | None = None

    @property
    def num_rows(self) -> int:
        x: Tensor = self.args[0]
        return x.numel() // x.shape[-1]


class CalledExperts:
    """The calls a block makes of its experts in one step."""

    def __init__(self, calls: list[Call]) -> None:
        self._calls: dict[int, list[Call]] = {}
        for call in calls:
            self._calls.setdefault(call.expert_idx, []).append(call)

    def routing(self, top_k_index_TK: Tensor | None, num_tokens: int) -> Routing:
        """Return the experts that the block called; `top_k_index_TK` if each token's are known."""
        activated = sorted(self._calls)
        counts = [sum(call.num_rows for call in self._calls[e]) for e in activated]
        on_host_TK = None if top_k_index_TK is None else top_k_index_TK.cpu().numpy()
        counted = np.array(counts, dtype=np.int64)
        return Routing(num_tokens, activated, counted, 0, on_host_TK, None)

    def answer(self, expert_idx: int, mlp: Callable[..., Tensor], weights: Any) -> None:
        for call in self._calls[expert_idx]:
            run = partial(mlp, weights, *call.args, **call.kwargs)
            call.answer = without_gradient(run, call.args[0])


class TopKRecorder(TorchFunctionMode):
    """A context that keeps the ids of the last top-k over all experts, and changes nothing."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self._num_experts = num_experts
        self.top_k_index_TK: Tensor | None = None
        setattr(self, CHANGES_NOTHING, True)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk) and args[0].shape[-1] == self._num_experts:
            self.top_k_index_TK = result.indices.reshape(-1, result.indices.shape[-1])
        return result


class ListOfExperts(OneModuleEach):
    """The adapter of lists: it connects the block that calls the experts."""

    def connect(self, experts: ExpertsModule, model: nn.Module, layer: MoeLayer) -> None:
        block = model.get_submodule(experts.block_name)
        block.forward = BlockForward(block, experts, layer)


LIST = ListOfExperts()


def is_list_of_experts(module: nn.Module) -> bool:
    """Return True for several modules of one class, with parameters of one shape and no buffers."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or len(module) < 2:
        return False
    if any(True for _ in module.buffers()):
        return False
    shapes = [
        (type(expert), [(key, param.shape) for key, param in expert.named_parameters()])
        for expert in module.children()
    ]
    return all(shape == shapes[0] for shape in shapes) and bool(shapes[0][1])


class BlockForward:
    """The forward method of a block that calls its experts one by one."""

    def __init__(self, block: nn.Module, experts: ExpertsModule, layer: MoeLayer) -> None:
        self._stock = block.forward
        self._layer = layer
        self._name = experts.block_name
        self._num_experts = experts.num_experts
        self._autocast = _autocast()  # while the block runs
        self._calls: list[Call] = []
        self._answers: Iterator[Call] = iter(())
        self._respond = self._refuse  # what a called expert does
        for expert_idx, expert in enumerate(experts.module.children()):
            expert.forward = partial(self._expert, expert_idx)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x: Tensor = next(iter((*args, *kwargs.values())))  # [..., D]
        num_tokens = x.numel() // x.shape[-1]
        # Between two layers of a prompt other passes may go through this block.
        kept = self._calls, self._answers, self._respond, self._autocast
        self._calls = []
        self._autocast = _autocast()
        try:
            self._respond = self._note
            with TopKRecorder(self._num_experts) as top_k:
                self._stock(*args, **kwargs)
            if num_tokens and not self._calls:
                raise UnsupportedModelError(f"{self._name} does not call its experts")
            calls = [call for call in self._calls if call.num_rows]
            top_k_index_TK = _routing(top_k.top_k_index_TK, calls, num_tokens)
            answered = CalledExperts(calls)
            self._layer.answer_calls(answered, answered.routing(top_k_index_TK, num_tokens))
            self._answers = iter(self._calls)
            self._respond = self._answer
            return self._stock(*args, **kwargs)
        finally:  # a prompt's rows take memory
            self._calls, self._answers, self._respond, self._autocast = kept

    def _expert(self, expert_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Run in place of an expert's forward."""
        if not args or not isinstance(args[0], Tensor) or _autocast() != self._autocast:
            raise UnsupportedModelError(
                f"{self._name}: experts are to be called with a tensor, not under autocast"
            )
        return self._respond(Call(expert_idx, args, kwargs))

    def _note(self, call: Call) -> Tensor:
        """Note a call of the first run, with a copy of its input: the block may use that memory
        again for the next expert.
        """
        call.args = tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in call.args)
        self._calls.append(call)
        return torch.zeros_like(call.args[0])

    def _answer(self, call: Call) -> Tensor:
        """Answer a call of the second run, in which the block has to make the same calls again."""
        noted = next(self._answers, None)
        if noted is None or noted.expert_idx != call.expert_idx or not _are_equal(noted, call):
            raise UnsupportedModelError(
                f"{self._name}: called again, it calls its experts otherwise: do they depend on "
                "each other, or is its input changed in place?"
            )
        return torch.zeros_like(call.args[0]) if noted.answer is None else noted.answer

    def _refuse(self, call: Call) -> Tensor:
        raise UnsupportedModelError(
            f"an expert of {self._name} is called from outside that module's forward"
        )


def _are_equal(noted: Call, call: Call) -> bool:
    x = noted.args[0]
    y = call.args[0]
    return torch.equal(x, y) or (x.shape == y.shape and x.allclose(y, 0, 0, equal_nan=True))


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _routing(top_k_index_TK: Tensor | None, calls: list[Call], num_tokens: int) -> Tensor | None:
    """Return the experts of each token: `top_k_index_TK` if it agrees with the calls, and for a
    single token the experts that were called. Otherwise None.
    """
    called = sorted(call.expert_idx for call in calls for _ in range(call.num_rows))
    if top_k_index_TK is not None and len(top_k_index_TK) == num_tokens:
        chosen = sorted(top_k_index_TK.ravel().tolist())
        if chosen == called:
            return top_k_index_TK
    return torch.tensor([called], dtype=torch.int64, device="cpu") if num_tokens == 1 else None
