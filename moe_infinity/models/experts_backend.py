"""Our experts backend in transformers: it hands each layer's routing to the runtime, and says when
a step begins.

transformers calls the backend of every experts module with (module, hidden states [T, D],
top_k_index [T, K], top_k_weights [T, K]), all padding included, sequences flattened. What the model
was called with (batch, mask, cache) is read by a forward pre-hook on the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from moe_infinity.experts import Phase
from moe_infinity.models.loading import ExpertsModule
from moe_infinity.runtime import ExpertRuntime
from moe_infinity.trace.recorder import Step

BACKEND = "moe_infinity"  # the name of our experts implementation in transformers
ROW_ATTRIBUTE = "_moe_infinity_row"  # set on each experts module: (runtime, MoE row)


def experts_forward(
    self: Any, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
) -> Tensor:
    """What transformers calls instead of its own loop over experts."""
    runtime: ExpertRuntime
    runtime, moe_row = getattr(self, ROW_ATTRIBUTE)
    return runtime.moe_layer(moe_row, self, x_TD, top_k_index_TK, top_k_weights_TK)


def register() -> None:
    """Make the backend known to transformers; again is harmless."""
    ExpertsInterface.register(BACKEND, experts_forward)


def attach(
    model: PreTrainedModel, rows: list[ExpertsModule], runtime: ExpertRuntime
) -> RemovableHandle:
    """Connect the experts modules of `model` to the runtime. Removing the handle stops the step
    hook.
    """
    for moe_row, row in enumerate(rows):
        object.__setattr__(row.module, ROW_ATTRIBUTE, (runtime, moe_row))
    end_ids = _end_ids(model)

    def before_forward(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = read_step(args, kwargs, end_ids)
        if step is not None:
            runtime.begin_step(step)

    handle: RemovableHandle = model.register_forward_pre_hook(before_forward, with_kwargs=True)
    return handle


def read_step(
    args: tuple[Any, ...], kwargs: dict[str, Any], end_ids: NDArray[np.int64]
) -> Step | None:
    """What kind of step a call of the model is; None when it was called with neither ids nor
    embeddings.

    `end_ids`: tokens that end a sequence or pad it. In a batch, a finished sequence is fed these
    while others go on.
    """
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    inputs = input_ids if input_ids is not None else kwargs.get("inputs_embeds")
    if inputs is None:
        return None
    num_sequences, num_new = inputs.shape[:2]
    mask, cache = kwargs.get("attention_mask"), kwargs.get("past_key_values")
    if mask is not None and mask.ndim != 2:
        mask = None  # already expanded for attention: what is cached must come from the cache
    if mask is not None:
        num_cached = mask.shape[1] - num_new
    else:
        num_cached = int(cache.get_seq_length()) if cache is not None else 0
    is_decode = num_new == 1 and num_cached > 0
    token_ids_T = input_ids.cpu().numpy().ravel() if input_ids is not None else None
    counted_T = mask[:, -num_new:].cpu().numpy().astype(bool).ravel() if mask is not None else None
    if is_decode and num_sequences > 1 and token_ids_T is not None:
        running_T = ~np.isin(token_ids_T, end_ids)
        counted_T = running_T if counted_T is None else counted_T & running_T
    return Step(
        phase=Phase.DECODE if is_decode else Phase.PREFILL,
        num_sequences=num_sequences,
        tokens_per_sequence=num_new,
        begins_request=num_cached == 0,
        counted_T=None if counted_T is None or counted_T.all() else counted_T,
        token_ids_T=token_ids_T,
    )


def _end_ids(model: PreTrainedModel) -> NDArray[np.int64]:
    generation = model.generation_config
    ids: list[int] = []
    for value in (generation.eos_token_id, generation.pad_token_id):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return np.array(ids, dtype=np.int64)
