"""The forward passes of a served model: a chunk of a prompt, or one token of each sequence.

With one seat the model gets the same arguments as from generate(), so it gives the same bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache

from moe_infinity.errors import UnsupportedModelError
from moe_infinity.experts import Phase, Step
from moe_infinity.model import MoE
from moe_infinity.server.batch import DecodeBatch, has_recurrent_layers, layers_that_cannot_join
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.sequences import Running


class Passes:
    """Runs the model for the engine.

    Raises UnsupportedModelError for a model that cannot be served, or cannot be served in batches.
    """

    def __init__(self, moe: MoE, config: ServeConfig) -> None:
        self.end_ids = end_ids_of(moe.model)
        self._moe = moe
        self._num_seats = config.max_batch
        self._accepts = set(inspect.signature(moe.model.forward).parameters)
        self._require_servable()
        # With one seat a prompt is one pass, as in generate(). Recurrent layers would begin anew
        # with each chunk.
        is_chunked = config.max_batch > 1 and not has_recurrent_layers(moe.model.config)
        self._chunk = config.prefill_chunk if is_chunked else None

    def _require_servable(self) -> None:
        model = self._moe.model
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError("encoder-decoder models are not served; use generate()")
        if type(model).generate is not GenerationMixin.generate:
            raise UnsupportedModelError(
                "a model with a generate() of its own is not served; use it"
            )
        if not model._supports_default_dynamic_cache():
            raise UnsupportedModelError("a model with a cache of its own is not served")
        apart = layers_that_cannot_join(model.config)
        if apart and self._num_seats > 1:
            raise UnsupportedModelError(
                f"the caches of this model cannot be put together ({', '.join(apart)}); "
                "serve one request at a time with --max-batch 1"
            )

    def prefill(self, sequence: Running) -> Tensor:
        """Compute the next chunk of a prompt. Returns [V] float32 logits of its last token."""
        prompt_ids = sequence.request.prompt_ids
        start = sequence.num_prefilled
        end = None if self._chunk is None else start + self._chunk
        chunk = prompt_ids[start:end]
        if sequence.cache is None:
            sequence.cache = DynamicCache(config=self._moe.model.config)
        inputs = {
            "input_ids": torch.tensor([chunk], dtype=torch.long, device="cpu"),
            "attention_mask": torch.ones((1, start + len(chunk)), dtype=torch.long, device="cpu"),
            "position_ids": torch.arange(start, start + len(chunk), device="cpu")[None],
            "past_key_values": sequence.cache,
        }
        step = self._step(Phase.PREFILL, [sequence] * len(chunk), chunk, begins=start == 0)
        logits_1V = self._forward(step, inputs)
        sequence.num_prefilled += len(chunk)
        return logits_1V[0]

    def decode(self, sequences: Sequence[Running], batch: DecodeBatch) -> Tensor:
        """Compute one token of each sequence. Returns [B, V] float32 logits.

        The caller must empty the batch if this raises.
        """
        token_ids = [sequence.last_id for sequence in sequences]
        step = self._step(Phase.DECODE, sequences, token_ids, begins=False)
        logits_BV = self._forward(step, batch.inputs(token_ids))
        batch.grow()
        return logits_BV

    def _forward(self, step: Step, inputs: dict[str, Any]) -> Tensor:
        """[B, V] float32 logits of the last token, on the CPU: there the tokens are chosen."""
        inputs |= {"use_cache": True, "logits_to_keep": 1}
        accepted = {name: value for name, value in inputs.items() if name in self._accepts}
        output = self._moe.forward(step, **accepted)
        logits_BV: Tensor = output.logits[:, -1].to("cpu", copy=True, dtype=torch.float32)
        return logits_BV

    def _step(
        self, phase: Phase, owners: Sequence[Running], token_ids: Sequence[int], *, begins: bool
    ) -> Step:
        """The step for the recorder. `owners` has the sequence of each token."""
        sequence_T = np.array([owner.seat for owner in owners])
        begins_B = np.zeros(self._num_seats, dtype=bool)
        begins_B[sequence_T] = begins
        return Step(
            phase=phase,
            num_sequences=self._num_seats,
            tokens_per_sequence=1,
            begins_B=begins_B,
            token_ids_T=np.array(token_ids),
            sequence_T=sequence_T,
        )


def end_ids_of(model: Any) -> frozenset[int]:
    """Ids of the tokens that end a sequence; none if the model defines none."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = model.config.get_text_config().eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)
