"""The forward passes of a model on a GPU.

    prompt, another cache, gradients     the model's own forward
    one token of each sequence           attention by our kernels
        if the device decides            as a CUDA graph, one for each number of sequences

GraphedStep replaces `model.forward`. If somebody has changed, hooked or patched anything inside the
model, all of it runs its own code (architectures/module_state.py). The inputs of a graph are all
tensors among the arguments. The other arguments are part of it, and so are the addresses of
recurrent states, which a layer changes in place: if they change, another one is captured.

Private names of torch used here: `torch.utils._pytree`, and two of `torch._C` (`_leave_pool`).
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from moe_infinity.architectures.attention_inputs import CACHE_NAMES, MASK, cache_in, cache_parameter
from moe_infinity.architectures.module_state import ModuleState
from moe_infinity.architectures.trial import Found
from moe_infinity.gpu.cached_step import (
    AttentionSwitch,
    CachedStep,
    CachedSteps,
    try_steps,
)
from moe_infinity.gpu.device_steps import DeviceSteps
from moe_infinity.gpu.fused_modules import FusedModules
from moe_infinity.memory.cuda import CAPTURING

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 1  # of a kind, before it is captured: kernels are compiled in them
MOST_GRAPHS = 32
POSITIONS = "position_ids"


class _Graph:
    """Steps of one kind: how often they ran, and their graph once there is one."""

    def __init__(self) -> None:
        self.num_eager = 0
        self.inputs: list[Any] = []  # tensors that the graph reads, among constants
        self.replay: Callable[[], Any] | None = None
        self.cache: Any = None  # of the step that was captured, which is in what it gives
        self.shapes: dict[int, tuple[int, int]] = {}  # of its MoE layers, see reports.py


class GraphedStep:
    """Runs the forward passes of one model."""

    def __init__(self, model: PreTrainedModel, steps: DeviceSteps, fused: FusedModules) -> None:
        """Replaces `model.forward` until close(). The model is tried, so its experts have to
        answer.
        """
        self._model = model
        self._steps = steps
        self._fused = fused
        self._state: ModuleState | None = None  # None: nobody else has the model yet
        self.change: str | None = None  # of the modules, since then
        self._forward: Callable[..., Any] = model.forward
        self._stream = new_stream(model.device)
        self._may_capture = has_graphs(model.device)
        self._graphs: dict[Any, _Graph] = {}  # by what is constant in them, the newest last
        self._is_graph = False
        self._switch = AttentionSwitch(model)
        self._cached: CachedSteps | None = None
        if POSITIONS in signature(self._forward).parameters:
            self._cached = CachedSteps(model.device, steps.kernels)
            if not isinstance(try_steps(model, self), Found):
                self._cached = None

        @wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        vars(model)["forward"] = forward

    @property
    def has_graph(self) -> bool:
        """True if the last step was a graph."""
        return self._is_graph

    def note_state(self) -> None:
        """Note what the modules are like, with all that we change of them."""
        modules = list(self._model.modules())
        self._state = ModuleState(modules[1:], around=modules[:1])

    def look(self) -> bool:
        """Return True if no module has changed. For each pass, before it begins."""
        before = self.change
        self.change = None if self._state is None else self._state.change()
        if self.change is not None and before is None:
            logger.warning("the model runs its own code, which is slower: %s", self.change)
        return self.change is None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._is_graph = False
        if self.change is not None:
            return self._forward(*args, **kwargs)
        cached = None if args else self._cached_step(kwargs)
        with self._running():
            if cached is None:
                return self._compute(*args, **kwargs)
            with cached.under_way(), self._switch.to():
                out = self._run(cached, kwargs | {MASK: None})
        cached.take()
        return out

    def _running(self) -> Any:
        """While the device decides."""
        return self._steps.running() if self._steps.has_begun else nullcontext()

    def _cached_step(self, kwargs: dict[str, Any]) -> CachedStep | None:
        """Room in the cache for one token of each sequence; None if the step is not one that our
        attention computes.
        """
        positions = kwargs.get(POSITIONS)
        mask = kwargs.get(MASK)
        if self._cached is None or torch.is_grad_enabled() or not isinstance(positions, Tensor):
            return None
        if positions.shape[-1] != 1 or not isinstance(mask, Tensor | None):
            return None
        num_seqs = positions.shape[-2]
        if mask is not None and (mask.ndim != 2 or len(mask) != num_seqs):
            return None
        return self._cached.of(cache_in(kwargs), num_seqs, mask)

    def _run(self, cached: CachedStep, kwargs: dict[str, Any]) -> Any:
        """One step, as a graph if one like it has run before."""
        if not self._steps.is_running or not self._may_capture:
            return self._compute(**kwargs)
        rest = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        cache = cache_in(kwargs)
        values, spec = tree_flatten(rest)
        constants = [(v.shape, v.dtype) if isinstance(v, Tensor) else v for v in values]
        key = (torch.is_inference_mode_enabled(), spec, *constants, *cached.states)
        graph = self._graphs.pop(key, None) or _Graph()
        self._graphs[key] = graph
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        if graph.replay is None and graph.num_eager >= WARM_UP_STEPS:
            graph.inputs = [copy_of(value) for value in values]
            graph.cache = copy.copy(cache)
            graph.cache.layers = list(graph.cache.layers)
            name = cache_parameter(self._forward)
            inputs = tree_unflatten(graph.inputs, spec) | {name: graph.cache}
            graph.replay = self._captured(cached, inputs)
            graph.cache.layers.clear()  # else it would keep the memory of this request
            graph.shapes = dict(self._steps.poller.shapes)
        if graph.replay is None:
            graph.num_eager += 1
            return self._compute(**kwargs)
        for place, value in zip(graph.inputs, values, strict=True):
            if isinstance(value, Tensor):
                place.copy_(value)
        self._is_graph = True
        self._steps.poller.shapes = dict(graph.shapes)
        return copy_of(graph.replay(), graph.cache, cache)

    def _captured(self, cached: CachedStep, kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        def run() -> Any:
            with cached.without_lengths():
                return self._compute(**kwargs)

        try:
            with self._steps.capturing():
                return capture(self._stream, run)
        except Exception as error:
            self._may_capture = False
            # To end a failed capture raises once more, and that error says less.
            cause = error.__context__ or error
            logger.warning("no CUDA graph of a decode step, it runs kernel by kernel: %s", cause)
            logger.info("where its capture failed", exc_info=error)
            return None

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        with self._fused.installed():
            return self._forward(*args, **kwargs)

    def forget(self) -> None:
        """Drop the graphs: others are captured as steps come."""
        self._graphs.clear()

    def close(self) -> None:
        """Drop the graphs, and give the model its own forward back."""
        self.forget()
        vars(self._model).pop("forward", None)


# Graphs


def has_graphs(device: torch.device) -> bool:
    """Return True if what is launched on this device can be captured."""
    return device.type == "cuda"


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which one model is captured; None without a GPU.

    Each model has its own of torch's 32 streams. When a graph is freed, torch 2.13 frees cuBLAS
    memory of all graphs that were captured on its stream (torch's issue 193402).
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def capture(stream: torch.cuda.Stream | None, run: Callable[[], Any]) -> Callable[[], Any]:
    """Capture the kernels that `run` launches. Returns a function that launches them again, with
    the same memory for inputs and outputs, and returns what `run` returned. For devices that
    `has_graphs` allows.
    """
    assert stream is not None
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    with CAPTURING:
        # A model that is collected waits for its device, in any thread, and that would end the
        # capture: so nothing is collected meanwhile.
        restore_gc = gc.enable if gc.isenabled() else gc.disable
        try:
            gc.disable()
            with (
                torch.cuda.device(stream.device),
                # A capture that fails leaves its own stream current.
                torch.cuda.stream(torch.cuda.current_stream(stream.device)),
                # "thread_local": read threads may page-lock memory during the capture.
                torch.cuda.graph(graph, pool, stream, "thread_local"),
            ):
                out = run()
        except BaseException:
            _leave_pool(stream.device, pool)
            raise
        finally:
            restore_gc()

    def replay() -> Any:
        graph.replay()
        return out

    return replay


def _leave_pool(device: torch.device, pool: Any) -> None:
    """End a capture that CUDA has ended for torch too.

    torch 2.11 goes on as if the capture were under way. Then no other capture can begin, no memory
    be freed (which every new model does), and no random number be drawn.
    """
    with suppress(RuntimeError, AttributeError):  # torch has ended it, or a later torch has renamed
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())


def copy_of(out: Any, replaced: Any = None, by: Any = None) -> Any:
    """A copy of a model's output that the next replay does not overwrite, and which has `by` in
    place of `replaced`.
    """
    if isinstance(out, Tensor):
        return out.clone()
    if isinstance(out, ModelOutput):
        return type(out)(**{name: copy_of(v, replaced, by) for name, v in out.items()})
    if isinstance(out, tuple):
        return tuple(copy_of(value, replaced, by) for value in out)
    return by if replaced is not None and out is replaced else out
