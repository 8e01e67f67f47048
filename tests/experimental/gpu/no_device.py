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

from moe_infinity.engine.compute import LayerComputer
from moe_infinity.experimental.gpu import graphed_step
from moe_infinity.experimental.gpu.attention_modules import FusedAttention
from moe_infinity.experimental.gpu.cached_step import AttentionKernels, CachedStep, Place
from moe_infinity.experimental.gpu.device_steps import StepState
from moe_infinity.experimental.gpu.device_table import DeviceTable
from moe_infinity.experimental.gpu.graphed_step import GraphedStep
from moe_infinity.experimental.gpu.kernels import rotary_reference
from moe_infinity.experimental.gpu.kernels.slot_mlp import SlotMlp
from moe_infinity.experimental.gpu.mlps import FusedMlp
from moe_infinity.experimental.gpu.slot_kernels import SlotKernels
from tests.cache_name import CACHE
from tests.experimental.gpu.fake_cuda import FakeCudaDevice

NOWHERE = torch.device("meta")
NUM_EXPERTS = 4  # that made-up routing goes to: a model has more, and fewer per token
# They wait for the device, or for its answer how large their result is.
WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::equal",
    "aten::is_nonzero", "aten::repeat_interleave.Tensor",
}  # fmt: skip
# They copy numbers from the host, which a meta tensor would not show.
FROM_THE_HOST = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor}
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


def move(model: PreTrainedModel, cache: DynamicCache) -> None:
    """All that a step reads but its inputs. For good: there is no way back."""
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = nn.Parameter(nowhere(param), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = nowhere(buffer)
    fused = [getattr(vars(m).get("forward"), "__self__", None) for m in model.modules()]
    ways = [each.way for each in fused if isinstance(each, FusedAttention)]
    joined = [*ways, *(each for each in fused if isinstance(each, FusedMlp))]
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


def compute_pairs(
    mlp: SlotMlp,
    x_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    pointers_E: Tensor,
    out_PD: Tensor,
) -> None:
    assert weights_TK.shape == index_TK.shape
    assert len({t.device for t in (x_TD, index_TK, weights_TK, pointers_E, out_PD)}) == 1


def sum_pairs(
    mlp: SlotMlp, out_PD: Tensor, index_TK: Tensor, weights_TK: Tensor, dtype: torch.dtype
) -> Tensor:
    return out_PD.new_empty(len(index_TK), out_PD.shape[1], dtype=dtype)


KERNELS = SlotKernels(resolve, fill, compute_pairs, sum_pairs)  # ours need memory to look into


def attend(query_BHd: Tensor, key_BGd: Tensor, value_BGv: Tensor, *_: Any, **__: Any) -> Tensor:
    return query_BHd.new_empty(*query_BHd.shape[:2], value_BGv.shape[-1])


def attend_latent(
    query_BHr: Tensor,
    _: Tensor,
    __: Tensor,
    ___: Tensor,
    expand_Hvr: Tensor,
    *____: Any,
    **more: Any,
) -> Tensor:
    return query_BHr.new_empty(*query_BHr.shape[:2], expand_Hvr.shape[1])


ATTENTION_KERNELS = AttentionKernels(attend, attend_latent, rotary_reference.make_heads)


class Captured(BaseException):
    """A decode step at the moment of its capture, with what generate() calls it with."""

    def __init__(self, step: GraphedStep, cached: CachedStep, kwargs: dict[str, Any]) -> None:
        self.model, self._cached = step._model, cached
        self._forward, self._steps, self._switch = step._forward, step._steps, step._switch
        values, spec = tree_flatten({k: v for k, v in kwargs.items() if k != CACHE})
        self._kwargs = {CACHE: kwargs[CACHE]} | tree_of_nowhere(values, spec)
        move(self.model, kwargs[CACHE])
        numbers = [nowhere(place.numbers) for place in cached._places]
        cached._places = [Place(each, ATTENTION_KERNELS) for each in numbers]
        assert self._steps is not None
        self._steps.layers.kernels = KERNELS

    def run(self) -> Tensor:
        assert self._steps is not None
        self._steps._state = StepState.RUNNING
        with self._cached.under_way(), self._cached.without_lengths(), self._switch.to():
            logits: Tensor = as_captured(lambda: self._forward(**self._kwargs)).logits
        return logits


@contextmanager
def capturing() -> Iterator[None]:
    """Inside, the first step that would be captured raises Captured."""

    def capture(step: GraphedStep, *args: Any) -> None:
        raise Captured(step, *args)

    graphs = mock.patch.object(graphed_step, "has_graphs", return_value=True)
    with graphs, mock.patch.object(GraphedStep, "_captured", capture):
        yield


# What the host decides


class MetaCudaDevice(FakeCudaDevice):
    """Models opened with it have everything there but HOST."""

    device = NOWHERE

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=NOWHERE)


class _Unmixed(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if len({t.device for t in tensors if t.ndim}) > 1 and func.name() != "aten::copy_":
            raise AssertionError(f"{func.name()} mixes devices")
        return func(*args, **kwargs or {})


class _NotFromTheHost(TorchFunctionMode):
    """A device waits for such a copy, and all that was launched before it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **kwargs or {})
        if func in FROM_THE_HOST and isinstance(out, Tensor) and out.device == NOWHERE:
            raise AssertionError(f"{func.__name__} copies from the host")
        return out


@contextmanager
def made_up_routing() -> Iterator[None]:
    """The host asks for routing, token ids and a signature, of which there are none: so they are
    made up. Nothing else can be asked for, no operation may mix devices, and experts copy nothing.
    """
    cpu = Tensor.cpu

    def made_up(tensor: Tensor) -> Tensor:
        if tensor.device != NOWHERE:
            return cpu(tensor)
        ids = torch.arange(tensor.numel()) % NUM_EXPERTS
        return ids.to(tensor.dtype).view(tensor.shape)

    run = LayerComputer.run

    def watched(*args: Any) -> None:
        with _NotFromTheHost():
            run(*args)

    asked = mock.patch.object(Tensor, "cpu", made_up)
    computing = mock.patch.object(LayerComputer, "run", watched)
    with asked, computing, torch.no_grad(), _Unmixed():
        yield
