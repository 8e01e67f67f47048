"""The forward passes of a model on a GPU.

    prompt, another cache, gradients     the model's own forward
    one token of each sequence           attention by our kernels
        if the device decides            as a CUDA graph, one for each number of sequences

GraphedStep replaces `model.forward`. The inputs of a graph are all tensors among the arguments. The
other arguments are part of it, and so are the addresses of recurrent states, which a layer changes
in place: if they change, another one is captured.

Private name of torch used here: `torch.utils._pytree`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel

from moe_infinity.architectures.cache_argument import CACHE_NAMES, cache_in, cache_parameter
from moe_infinity.experimental.gpu.attention import (
    AttentionSwitch,
    attention_kernels,
    gives_the_same,
)
from moe_infinity.experimental.gpu.cached_step import CachedStep, CachedSteps
from moe_infinity.experimental.gpu.device_steps import DeviceSteps
from moe_infinity.experimental.gpu.graph import capture, copy_of, has_graphs, new_stream

logger = logging.getLogger(__name__)

WARM_UP_STEPS = 1  # of a kind, before it is captured: kernels are compiled in them
MOST_GRAPHS = 32
MASK = "attention_mask"
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

    def __init__(
        self, model: PreTrainedModel, steps: DeviceSteps | None, *, may_capture: bool = True
    ) -> None:
        """Replaces `model.forward` until close(). `steps`: None if the host decides in all. The
        model is tried, so its experts have to answer.
        """
        self._model = model
        self._steps = steps
        self._forward: Callable[..., Any] = model.forward
        self._stream = new_stream(model.device)
        self._may_capture = may_capture and has_graphs(model.device)
        self._graphs: dict[Any, _Graph] = {}  # by what is constant in them, the newest last
        self._is_graph = False
        self._switch = AttentionSwitch(model)
        self._cached: CachedSteps | None = None
        kernels = attention_kernels(model.device)
        if kernels is not None and POSITIONS in signature(self._forward).parameters:
            self._cached = CachedSteps(model.device, kernels)
            if not gives_the_same(model, self):
                self._cached = None

        @wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        vars(model)["forward"] = forward

    @property
    def has_graph(self) -> bool:
        """Whether the last step was a graph."""
        return self._is_graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._is_graph = False
        cached = None if args else self._cached_step(kwargs)
        with self._running():
            if cached is None:
                return self._forward(*args, **kwargs)
            with cached.under_way(), self._switch.to():
                out = self._run(cached, kwargs | {MASK: None})
        cached.take()
        return out

    def _running(self) -> Any:
        """While the device decides."""
        is_begun = self._steps is not None and self._steps.has_begun
        return self._steps.running() if self._steps and is_begun else nullcontext()

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
        if self._steps is None or not self._steps.is_running or not self._may_capture:
            return self._forward(**kwargs)
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
            inputs = tree_unflatten(graph.inputs, spec) | {
                cache_parameter(self._forward): graph.cache
            }
            graph.replay = self._captured(cached, inputs)
            graph.cache.layers.clear()  # else it would keep the memory of this request
            graph.shapes = dict(self._steps.poller.shapes)
        if graph.replay is None:
            graph.num_eager += 1
            return self._forward(**kwargs)
        for place, value in zip(graph.inputs, values, strict=True):
            if isinstance(value, Tensor):
                place.copy_(value)
        self._is_graph = True
        self._steps.poller.shapes = dict(graph.shapes)
        return copy_of(graph.replay(), graph.cache, cache)

    def _captured(self, cached: CachedStep, kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        assert self._steps is not None

        def run() -> Any:
            with cached.without_lengths():
                return self._forward(**kwargs)

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

    def forget(self) -> None:
        """Drop the graphs: others are captured as steps come."""
        self._graphs.clear()

    def close(self) -> None:
        """Drop the graphs, and give the model its own forward back."""
        self.forget()
        vars(self._model).pop("forward", None)
