"""A whole decode step as one CUDA graph, under transformers' generate().

    prompt, DynamicCache, gradients          the model's own forward
    StaticCache, first steps of a request    the same, to compile kernels and warm up
    StaticCache, later steps                 captured once, replayed with new inputs

GraphedStep replaces `model.forward`. The inputs of a graph are all tensors among the arguments.
The other arguments and the cache are part of the graph: if they change, another one is captured.

Private names of torch used here: `torch.utils._pytree`, and two of `torch._C` (`_leave_pool`).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers import PreTrainedModel, StaticCache
from transformers.utils import ModelOutput

from moe_infinity.cuda.cache_state import can_capture, state_of
from moe_infinity.cuda.device_steps import DeviceSteps
from moe_infinity.cuda.static_windows import StaticWindows
from moe_infinity.memory.cuda import CAPTURING

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2  # of a request, before it is captured
CACHE = "past_key_values"


class GraphedStep:
    """Runs the forward passes of one model, as graphs where that is possible."""

    def __init__(self, model: PreTrainedModel, steps: DeviceSteps) -> None:
        """Replaces `model.forward` until close()."""
        self._model = model
        self._steps = steps
        self._forward: Callable[..., Any] = model.forward
        self._stream = new_stream(model.device)
        self._has_failed = False  # a capture has failed; none is tried again
        self._forget()

        @wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        vars(model)["forward"] = forward

    @property
    def has_graph(self) -> bool:
        """Whether a graph was captured for the cache and the arguments of the last step."""
        return self._graph is not None

    def _forget(self) -> None:
        self._cache: StaticCache | None = None
        self._constants: list[Any] | None = None  # what the graph was captured with
        self._inputs: list[Any] = []  # tensors that the graph reads, among values that are constant
        self._graph: Callable[[], Any] | None = None
        self._num_eager = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        may_be_captured = not args and can_capture(cache)
        if cache is not self._cache or not self._steps.has_begun or not may_be_captured:
            self._forget()  # before another cache takes memory, or a prompt continues in this one
        if not self._steps.has_begun:
            return self._forward(*args, **kwargs)
        with self._steps.running():
            return self._run(cache, kwargs) if may_be_captured else self._forward(*args, **kwargs)

    def _run(self, cache: StaticCache, kwargs: dict[str, Any]) -> Any:
        """One step, as a graph if it was warmed up; of `kwargs` the cache is one."""
        windows = StaticWindows(cache)
        rest = {name: value for name, value in kwargs.items() if name != CACHE}
        values, spec = tree_flatten(rest)  # a mask may be a dict, by type of layer
        constants = [torch.is_inference_mode_enabled(), torch.is_grad_enabled(), spec]
        constants += [(v.shape, v.dtype) if isinstance(v, Tensor) else v for v in values]
        constants += state_of(cache)
        if constants != self._constants:
            self._forget()
            self._cache = cache
            self._constants = constants
        may_capture = not self._has_failed and not torch.is_grad_enabled()
        if self._graph is None and may_capture and self._num_eager >= WARM_UP_STEPS:
            self._capture(windows, {CACHE: cache}, values, spec)
        if self._graph is None:
            self._num_eager += 1
            return self._forward(**kwargs)
        for place, value in zip(self._inputs, values, strict=True):
            if isinstance(value, Tensor):
                place.copy_(value)
        out = copy_of(self._graph())
        windows.advance()
        return out

    def _capture(
        self, windows: StaticWindows, rest: dict[str, Any], values: list[Any], spec: TreeSpec
    ) -> None:
        windows.catch_up()
        self._inputs = [copy_of(value) for value in values]
        kwargs = rest | tree_unflatten(self._inputs, spec)

        def run() -> Any:
            with windows.on_device():
                return self._forward(**kwargs)

        try:
            with self._steps.capturing():
                self._graph = capture(self._stream, run)
        except Exception as error:
            self._has_failed = True
            # To end a failed capture raises once more, and that error says less.
            cause = error.__context__ or error
            logger.warning("no CUDA graph of a decode step, it runs kernel by kernel: %s", cause)
            logger.info("where its capture failed", exc_info=error)

    def close(self) -> None:
        """Drop the graph, and give the model its own forward back."""
        self._forget()
        vars(self._model).pop("forward", None)


def new_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream on which one model is captured; None without a GPU.

    Each model has its own of torch's 32 streams. When a graph is freed, torch 2.13 frees cuBLAS
    memory of all graphs that were captured on its stream (torch's issue 193402).
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def capture(stream: torch.cuda.Stream | None, run: Callable[[], Any]) -> Callable[[], Any]:
    """Capture the kernels that `run` launches. Returns a function that launches them again, with
    the same memory for inputs and outputs, and returns what `run` returned.

    Without a stream, as on a CPU, that function is `run` itself.
    """
    if stream is None:
        return run
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


def copy_of(out: Any) -> Any:
    """A copy of a model's output that the next replay does not overwrite."""
    if isinstance(out, Tensor):
        return out.clone()
    if isinstance(out, ModelOutput):
        return type(out)(**{name: copy_of(value) for name, value in out.items()})
    return tuple(map(copy_of, out)) if isinstance(out, tuple) else out
