"""A whole decode step as one CUDA graph, under transformers' generate().

    prompt, DynamicCache, gradients          the model's forward, as ever
    StaticCache, first steps of a request    the same, which compiles and warms up
    StaticCache, then                        captured once, replayed with new inputs

We stand in the place of `model.forward`. Inputs are all tensors in its arguments; whatever else it
is called with, and the cache, are part of the graph: if they change, it is captured anew. A step
that was lost (cuda/device_steps.py) is run again without a graph, from where the cache was
(cache_state.py).

Private names of torch used here: `torch.utils._pytree`, and two of `torch._C` (`_leave_pool`).
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers import PreTrainedModel, StaticCache
from transformers.utils import ModelOutput

from moe_infinity.cuda.cache_state import Before, can_capture, state_of
from moe_infinity.cuda.static_windows import StaticWindows
from moe_infinity.memory.cuda import CAPTURING

if TYPE_CHECKING:
    from moe_infinity.cuda.device_steps import DeviceSteps

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 2  # of a request, before it is captured
CACHE = "past_key_values"


class GraphedStep:
    """The forward passes of one model."""

    def __init__(self, model: PreTrainedModel, steps: DeviceSteps) -> None:
        self._model, self._steps = model, steps
        self._forward: Callable[..., Any] = model.forward
        # This model's alone, of the 32 of torch: when a graph goes, torch 2.13 frees memory that
        # cuBLAS has for every graph that was captured on the same stream (torch's issue 193402).
        self._stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._is_refused = False  # capture failed: not tried again
        self._forget()

        @wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        vars(model)["forward"] = forward

    def _forget(self) -> None:
        self._cache: StaticCache | None = None
        self._constants: list[Any] | None = None  # what the graph was captured with
        self._before: Before | None = None
        self._inputs: list[Any] = []  # tensors that it reads, among values that are constant
        self._graph: Callable[[], Any] | None = None
        self._num_eager = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get(CACHE)
        may_be_captured = not args and can_capture(cache)
        if cache is not self._cache or not self._steps.has_begun or not may_be_captured:
            self._forget()  # before another cache takes memory, or a prompt goes on with this one
        if not self._steps.has_begun:
            return self._forward(*args, **kwargs)
        self._steps.has_begun = False
        with self._steps.running(is_careful=not may_be_captured):
            if not may_be_captured:
                return self._forward(*args, **kwargs)
            out = self._run(cache, kwargs)
        if self._steps.is_lost():
            assert self._before is not None
            self._before.put_back()
            with self._steps.running(is_careful=True):
                out = self._forward(**kwargs)
            StaticWindows(cache).catch_up()
        return out

    def _run(self, cache: StaticCache, kwargs: dict[str, Any]) -> Any:
        windows = StaticWindows(cache)
        rest = {name: value for name, value in kwargs.items() if name != CACHE}
        values, spec = tree_flatten(rest)  # a mask may be one for each type of layer
        constants = [torch.is_inference_mode_enabled(), torch.is_grad_enabled(), spec]
        constants += [(v.shape, v.dtype) if isinstance(v, Tensor) else v for v in values]
        constants += state_of(cache)
        if constants != self._constants:
            self._forget()
            self._cache, self._constants = cache, constants
        if self._steps.can_lose:
            self._before = self._before or Before(cache)
            self._before.keep()
        is_wanted = not self._is_refused and not torch.is_grad_enabled()
        if self._graph is None and is_wanted and self._num_eager >= WARM_UP_STEPS:
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

        self._steps.is_captured = True
        try:
            self._graph = capture(self._stream, run)
        except Exception as error:
            self._is_refused = True
            # The end of a capture that failed raises, too, and says less.
            cause = error.__context__ or error
            logger.warning("no CUDA graph of a decode step, it runs kernel by kernel: %s", cause)
            logger.info("where its capture failed", exc_info=error)
        finally:
            self._steps.is_captured = False

    def close(self) -> None:
        self._forget()
        vars(self._model).pop("forward", None)


def capture(stream: torch.cuda.Stream | None, run: Callable[[], Any]) -> Callable[[], Any]:
    """Note the kernels that `run` launches; gives what launches them again, with the same memory
    for inputs and outputs. The plain twin, without a stream: what runs all of it again.
    """
    if stream is None:
        return run
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    # A capture that fails leaves its own stream current. Read threads may page-lock memory
    # meanwhile: their errors would be no business of ours. A model that nobody has any more waits
    # for its device when it is collected, in whatever thread, which a capture does not survive.
    with CAPTURING:
        as_before = gc.enable if gc.isenabled() else gc.disable
        try:
            gc.disable()
            with (
                torch.cuda.device(stream.device),
                torch.cuda.stream(torch.cuda.current_stream(stream.device)),
                torch.cuda.graph(graph, pool, stream, "thread_local"),
            ):
                out = run()
        except BaseException:
            _leave_pool(stream.device, pool)
            raise
        finally:
            as_before()

    def replay() -> Any:
        graph.replay()
        return out

    return replay


def _leave_pool(device: torch.device, pool: Any) -> None:
    """If CUDA ended the capture, torch 2.11 goes on as if it were under way: no other one could
    begin, no memory be given back, which every new model does, and no random number be drawn.
    """
    with suppress(RuntimeError, AttributeError):  # it has left it, or a later torch has other names
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
        generator = torch.cuda.default_generators[device.index]
        generator.graphsafe_set_state(generator.clone_state())


def copy_of(out: Any) -> Any:
    """What the next replay does not overwrite."""
    if isinstance(out, Tensor):
        return out.clone()
    if isinstance(out, ModelOutput):
        return type(out)(**{name: copy_of(value) for name, value in out.items()})
    return tuple(map(copy_of, out)) if isinstance(out, tuple) else out
