"""A device that is nowhere: torch's meta tensors in the place of a GPU's, for what a decode step
may not do while it is captured.

Meta tensors have no values, so nothing can be read back from them; every operation is seen before
it runs, and a tensor of the CPU among what goes in or comes out is refused, be it ever so small: a
graph would copy it in every replay, or keep what it was at capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from transformers import DynamicCache, PreTrainedModel

from moe_infinity.gpu import graphed_step
from moe_infinity.gpu.attention_modules import FusedAttention
from moe_infinity.gpu.cached_step import CachedStep, Place
from moe_infinity.gpu.device_steps import StepState
from moe_infinity.gpu.device_table import DeviceTable
from moe_infinity.gpu.fused_modules import FusedModules
from moe_infinity.gpu.graphed_step import GraphedStep
from moe_infinity.gpu.kernels import kernels_for
from moe_infinity.gpu.routers import FusedMlp
from tests.cache_name import CACHE
from tests.meta_device import FROM_THE_HOST, NOWHERE, PAIR_KERNELS

# They wait for the device, or for its answer how large their result is.
WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::equal",
    "aten::is_nonzero", "aten::repeat_interleave.Tensor",
}  # fmt: skip
INDEXING = {Tensor.__getitem__, Tensor.__setitem__}


class CannotBeCaptured(AssertionError):
    """An operation waits, or is not on the device."""


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func.name() in WAITING:
            raise CannotBeCaptured(f"{func.name()} waits for the device")
        try:
            out = func(*args, **kwargs or {})
        except NotImplementedError as error:  # it would have to know what is in a tensor
            raise CannotBeCaptured(f"{func.name()}: {error}") from error
        devices = {t.device for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}
        if devices - {NOWHERE}:
            raise CannotBeCaptured(f"{func.name()} has a tensor that is not on the device")
        return out


class _Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func in FROM_THE_HOST or (func in INDEXING and has_list(args[1])):
            raise CannotBeCaptured(f"{func.__name__} copies from the host")
        return func(*args, **kwargs or {})


def has_list(index: object) -> bool:
    """Numbers that become a tensor."""
    return isinstance(index, list) or (isinstance(index, tuple) and any(map(has_list, index)))


def as_captured(run: Callable[[], Any]) -> Any:
    """What `run` gives. Raises CannotBeCaptured."""
    with ExitStack() as modes:
        modes.enter_context(_Operations())
        modes.enter_context(_Functions())
        return run()


def nowhere(tensor: Tensor) -> Tensor:
    """One like it there; a view of less than its memory stays one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=NOWHERE)


def tree_of_nowhere(values: list[Any], spec: TreeSpec) -> Any:
    there = [nowhere(value) if isinstance(value, Tensor) else value for value in values]
    return tree_unflatten(there, spec)


def move(model: PreTrainedModel, fused: FusedModules, cache: DynamicCache) -> None:
    """All that a step reads but its inputs. For good: there is no way back."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(nowhere(param), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = nowhere(buffer)
    owners = [getattr(forward, "__self__", None) for _, forward in fused.forwards]
    ways = [each.products for each in owners if isinstance(each, FusedAttention)]
    joined = [*ways, *(each for each in owners if isinstance(each, FusedMlp))]
    for held in map(vars, joined):  # weights of several modules as one
        held.update({k: nowhere(v) for k, v in held.items() if isinstance(v, Tensor)})
    for layer in cache.layers:
        for held in (vars(layer), *(v for v in vars(layer).values() if isinstance(v, dict))):
            for name, value in held.items():
                if isinstance(value, Tensor):
                    held[name] = nowhere(value)
                elif isinstance(value, torch.device):
                    held[name] = NOWHERE


def resolve(table: DeviceTable, moe_layer_idx: int, top_k_index_TK: Tensor) -> Tensor:
    assert top_k_index_TK.dtype == torch.int64
    return torch.empty(table.num_experts, dtype=torch.int64, device=NOWHERE)


def fill(table: DeviceTable, num_pairs: int) -> None:
    """There is nothing to copy."""


def attend(query_BHd: Tensor, key_BGd: Tensor, value_BGv: Tensor, *_: Any, **__: Any) -> Tensor:
    return query_BHd.new_empty(*query_BHd.shape[:2], value_BGv.shape[-1])


def attend_latent(query_BHr: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.empty_like(query_BHr)


# Those of others are torch's operations on any device; these need memory to look into.
KERNELS = kernels_for(torch.device("cpu"))._replace(
    resolve=resolve,
    fill=fill,
    attend=attend,
    attend_latent=attend_latent,
    **PAIR_KERNELS._asdict(),
)


class Captured(BaseException):
    """A decode step at the moment of its capture, with what generate() calls it with."""

    def __init__(self, step: GraphedStep, cached: CachedStep, kwargs: dict[str, Any]) -> None:
        self.model, self._cached = step._model, cached
        self._compute, self._steps, self._switch = step._compute, step._steps, step._switch
        values, spec = tree_flatten({k: v for k, v in kwargs.items() if k != CACHE})
        self._kwargs = {CACHE: kwargs[CACHE]} | tree_of_nowhere(values, spec)
        move(self.model, step._fused, kwargs[CACHE])
        numbers = [nowhere(place.numbers) for place in cached._places]
        cached._places = [Place(each, KERNELS) for each in numbers]
        self._steps.kernels = KERNELS

    def run(self) -> Tensor:
        self._steps._state = StepState.RUNNING
        with self._cached.under_way(), self._cached.without_lengths(), self._switch.to():
            logits: Tensor = as_captured(lambda: self._compute(**self._kwargs)).logits
        return logits


@contextmanager
def capturing() -> Iterator[None]:
    """Inside, the first step that would be captured raises Captured."""

    def capture(step: GraphedStep, *args: Any) -> None:
        raise Captured(step, *args)

    graphs = mock.patch.object(graphed_step, "has_graphs", return_value=True)
    with graphs, mock.patch.object(GraphedStep, "_captured", capture):
        yield
