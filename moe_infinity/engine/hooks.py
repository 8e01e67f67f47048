"""How a model calls the engine, through two kinds of hooks.

    StepReader     around each forward pass: reads from its arguments which step it is
    EngineLayer    in each experts module: hands the routing of an MoE layer to `Experts.layer`

transformers calls our experts implementation with (module, hidden states [T, D], top_k_index
[T, K], top_k_weights [T, K]), all padding included, sequences flattened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from threading import RLock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from moe_infinity.architectures.adapters import (
    BACKEND,
    CALL_ATTRIBUTE,
    ExpertCalls,
    ExpertsModule,
    without_gradient,
)
from moe_infinity.architectures.attention_inputs import cache_in, cache_parameter
from moe_infinity.architectures.early_router import EarlyRouter, Routed
from moe_infinity.architectures.module_state import replace_forward, stock_forward
from moe_infinity.architectures.prompt_blocks import PromptBlocks
from moe_infinity.architectures.trial import Differs
from moe_infinity.architectures.without_experts import AbsentWeights, refuse_graphs, uncompiled
from moe_infinity.engine.experts import Experts
from moe_infinity.experts import Ints, Phase, Routing, Step
from moe_infinity.kernels.residents import Residents


class StepReader:
    """Calls `begin_step` before each forward pass, and `leave_step` if the pass did not end. An
    encoder and its decoder make steps of their own: the encoder's begins the requests, as a prompt
    does.
    """

    def __init__(
        self, model: PreTrainedModel, experts: Experts, lock: RLock, blocks: PromptBlocks
    ) -> None:
        self._one_at_a_time = lock
        self._blocks = blocks
        self._end_ids: Any = None  # tokens that end a sequence; None: the generation config's
        self._prompt_mask: Tensor | None = None
        self._named: Step | None = None
        self._model = model
        self._experts = experts
        self._is_in_pass = False  # if a pass does not end, it stays True until the next one
        self._finished_B: NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self._num_encoded = 0  # sequences the encoder ran for, until the decoder begins
        reads = {model: self.read}
        if model.config.is_encoder_decoder:
            reads = {model.get_encoder(): self.read_encoder, model.get_decoder(): self.read_decoder}
        self._undo = [
            replace_forward(module, self._around(module, read)) for module, read in reads.items()
        ]

    @cached_property
    def cache_parameter(self) -> str:
        """The model's name of the KV cache. Raises UnsupportedModelError if it takes none."""
        return cache_parameter(self._model.forward)

    @contextmanager
    def generating(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        """Inside, `generate()` runs with these arguments by name."""
        config = arguments.get("generation_config")
        self._end_ids = arguments.get("eos_token_id", config and config.eos_token_id)
        self._prompt_mask = arguments.get("attention_mask")
        try:
            yield
        finally:
            self._end_ids = self._prompt_mask = None

    @contextmanager
    def naming(self, step: Step) -> Iterator[None]:
        """Inside, a forward pass is this step, whatever its arguments say."""
        self._named = step
        try:
            yield
        finally:
            self._named = None

    def _around(self, module: Any, read: Callable[..., Step | None]) -> Callable[..., Any]:
        """Return a forward method in which each pass begins with its step. Hooks would not do: PEFT
        calls the forward method itself.
        """
        stock = stock_forward(module)

        @uncompiled
        @wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            refuse_graphs()
            with self._one_at_a_time, self._experts.local.unchanged_files():
                self.leave_pass()
                step = self._named or read(args, kwargs)
                if step is not None:
                    self._experts.begin_step(step)
                self._is_in_pass = True
                try:
                    out = stock(*args, **kwargs)
                finally:
                    self._blocks.size = None  # a call of the decoder alone is no such prompt
                self._is_in_pass = False
            return out

        return forward

    def leave_pass(self) -> None:
        """Call `leave_step` if the model's last pass did not end."""
        if self._is_in_pass:
            self._experts.leave_step()
        self._is_in_pass = False

    def read_encoder(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        """Return the step of an encoder."""
        step = self.read(args, kwargs)
        self._num_encoded = 0 if step is None else step.num_sequences
        return step

    def read_decoder(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        """Return the step of a decoder. Its first one goes on with the requests that the encoder's
        step began.
        """
        step = self.read(args, kwargs)
        num_encoded, self._num_encoded = self._num_encoded, 0
        if step is None or step.num_sequences != num_encoded:
            return step
        return replace(step, begins_B=np.zeros_like(step.begins_B))

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        """Return the step of a call with these arguments; None if it has neither ids nor
        embeddings.
        """
        input_ids = kwargs.get("input_ids", args[0] if args else None)
        inputs = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
        if inputs is None:
            return None
        num_sequences, num_new = inputs.shape[:2]
        mask = kwargs.get("attention_mask")
        cache = cache_in(kwargs)
        if isinstance(mask, torch.Tensor) and mask.ndim == 2:
            num_cached = mask.shape[1] - num_new
        else:  # none, or expanded for attention already, as with a static cache
            # Caches of transformers' continuous batching have none.
            num_cached = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
            mask = self._prompt_mask if num_cached == 0 else None
        is_decode = num_new == 1 and num_cached > 0
        token_ids_T = input_ids.cpu().numpy().ravel() if input_ids is not None else None
        counted_T = np.ones(num_sequences * num_new, dtype=bool)
        if mask is not None and mask.shape == (num_sequences, num_cached + num_new):
            counted_T &= mask[:, -num_new:].cpu().numpy().astype(bool).ravel()
        if is_decode and num_sequences > 1 and token_ids_T is not None:
            counted_T &= ~self._finished(token_ids_T)
        else:
            self._finished_B = np.zeros(num_sequences, dtype=bool)
        return Step(
            phase=Phase.DECODE if is_decode else Phase.PREFILL,
            num_sequences=num_sequences,
            tokens_per_sequence=num_new,
            begins_B=np.full(num_sequences, num_cached == 0),
            counted_T=None if counted_T.all() else counted_T,
            token_ids_T=token_ids_T,
            context=num_cached + num_new,
        )

    def _finished(self, token_ids_B: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which sequences of a batch have ended. The token that ended a sequence, and those
        that it is given while others go on, do not count for its request.
        """
        ends = self._end_ids
        if ends is None:
            ends = self._model.generation_config.eos_token_id
        if ends is not None:
            if len(self._finished_B) != len(token_ids_B):
                self._finished_B = np.zeros(len(token_ids_B), dtype=bool)
            self._finished_B |= np.isin(token_ids_B, np.asarray(ends))
        return self._finished_B

    def close(self) -> None:
        """Give the modules their own forward methods back."""
        for undo in self._undo:
            undo()


def experts_forward(
    self: Any, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
) -> Tensor:
    """Take the place of transformers' own loop over experts. A model that somebody makes from the
    config of one of ours has experts of its own, which transformers' default computes.
    """
    layer: EngineLayer | None = vars(self).get(CALL_ATTRIBUTE)  # see `attach` below
    inputs = x_TD, top_k_index_TK, top_k_weights_TK
    out_TD: Tensor = grouped_mm_experts_forward(self, *inputs) if layer is None else layer(*inputs)
    return out_TD


def register() -> None:
    """Make the backend known to transformers; again is harmless."""
    ExpertsInterface.register(BACKEND, experts_forward)


@dataclass(frozen=True, slots=True, eq=False)
class EngineLayer:
    """One MoE layer of a model's experts, as adapters call it."""

    experts: Experts
    moe_layer_idx: int
    absent: AbsentWeights
    early_router: EarlyRouter | None
    blocks: PromptBlocks

    @uncompiled
    def __call__(self, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
        if self._is_asked_early:
            raise Routed(top_k_index_TK.cpu().numpy())
        if self.blocks.is_trying:
            return x_TD.flip(-1) * 0.5
        self.absent.require_untouched()
        inputs = x_TD, top_k_index_TK, top_k_weights_TK
        return without_gradient(partial(self.experts.layer, self.moe_layer_idx, *inputs), *inputs)

    @uncompiled
    def answer_calls(self, calls: ExpertCalls, routing: Routing) -> None:
        if self._is_asked_early:
            raise Routed(routing.top_k_index_TK)
        if self.blocks.is_trying:
            raise Differs("its experts are called one by one")
        self.absent.require_untouched()
        self.experts.local.answer_calls(self.moe_layer_idx, routing, calls)

    def residents(self) -> Residents | None:
        """The layer's experts, if those of all layers are in memory and none has to leave."""
        if self._is_asked_early or self.absent.were_touched():
            return None
        return self.experts.local.residents(self.moe_layer_idx)

    def note(self, top_k_index_TK: Ints) -> None:
        """Those were computed for these tokens."""
        self.experts.local.note_residents(self.moe_layer_idx, top_k_index_TK)

    @property
    def _is_asked_early(self) -> bool:
        """True if the routing is all that is wanted."""
        return self.early_router is not None and self.early_router.is_asking


def attach(
    model: PreTrainedModel,
    layers: list[ExpertsModule],
    experts: Experts,
    early_router: EarlyRouter | None,
    blocks: PromptBlocks,
) -> None:
    """Let the experts modules of `model` call `experts`."""
    for moe_layer_idx, layer in enumerate(layers):
        absent = AbsentWeights(layer.name, layer.module)
        called = EngineLayer(experts, moe_layer_idx, absent, early_router, blocks)
        layer.adapter.connect(layer, model, called)
