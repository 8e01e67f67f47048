"""The forward passes of a served model: a chunk of a prompt, or one token of each sequence.

With one seat the model gets the same arguments as from generate(), so it gives the same bits.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_infinity.architectures.attention_inputs import cache_parameter
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.experts import Phase, Step
from moe_infinity.kernels.kv_layers import new_cache
from moe_infinity.memory.needs import USUAL_TOKENS
from moe_infinity.memory.room import LEAST_TOKENS
from moe_infinity.model import MoE
from moe_infinity.prefixes.cache_layers import (
    cut_windows,
    has_tokens,
    keep_windows,
    layers_that_cannot_join,
)
from moe_infinity.prefixes.continuing import why_not_in_parts
from moe_infinity.prefixes.lengths import Lengths
from moe_infinity.prefixes.prefix_tree import Node
from moe_infinity.prefixes.prompt_passes import require_number
from moe_infinity.prefixes.prompt_store import PromptStore
from moe_infinity.server.batch import DecodeBatch
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.image_passes import answer_positions, image_inputs, key_of
from moe_infinity.server.prefix_options import prefixes_of
from moe_infinity.server.sampling import ChosenToken, prompt_logprobs
from moe_infinity.server.sequences import NoEmbeddings, QueueFull, Running
from moe_infinity.server.turns import num_left_of
from moe_infinity.streaming import has_own_generate

logger = logging.getLogger(__name__)

# A pass over a prompt ends after about so long, and what it read is kept: who gives up after ten
# minutes, as most clients do, and tries again goes on from there.
PASS_S = 360.0
FIRST_PASS_TOKENS = 8192  # before any pass has told how long one takes


class Passes:
    """Runs the model for the engine.

    Raises UnsupportedModelError for a model that cannot be served, or cannot be served in batches.
    """

    def __init__(self, moe: MoE, config: ServeConfig, store: PromptStore | None) -> None:
        self._moe = moe
        self.num_seats = config.max_batch
        self._accepts = {*inspect.signature(moe.model.forward).parameters, "cache"}
        self._require_servable()
        # With one seat a prompt is one pass, as in generate(), unless logits of all its tokens are
        # wanted: they may not fit into memory.
        self.lengths = Lengths(moe.model)
        reason = why_not_in_parts(moe)
        self._can_chunk = reason is None
        self.reads_whole = not self._can_chunk  # prompts are read in one pass, however long
        self._chunk = config.prefill_chunk
        self._gap_share_s = config.gap_share_s
        self._token_layer_s = 0.0  # of a prompt's token in a layer, of the last pass of usual size
        self.room = moe.engine.room
        self._num_layers = len(moe.engine.path.computers)
        self.prefixes = prefixes_of(moe, config, reason, store)
        self.room.keeps_windows = self.prefixes.num_bytes > 0 and self.prefixes.needs_windows

    def _require_servable(self) -> None:
        model = self._moe.model
        if model.config.is_encoder_decoder:
            raise UnsupportedModelError("encoder-decoder models are not served; use generate()")
        if has_own_generate(model):
            raise UnsupportedModelError(
                "a model with a generate() of its own is not served; use it"
            )
        if not model._supports_default_dynamic_cache():
            raise UnsupportedModelError("a model with a cache of its own is not served")
        cache_parameter(model.forward)
        apart = layers_that_cannot_join(model.config)
        if apart and self.num_seats > 1:
            raise UnsupportedModelError(
                f"the caches of this model cannot be put together ({', '.join(apart)}); "
                "serve one request at a time with --max-batch 1"
            )

    def can_hold(self, sequence: Running, others: Sequence[Running], num_held: int) -> bool:
        """True if there is memory for one more sequence: in a batch with the others all rows are as
        long as the longest, and `num_held` tokens of these are there. Alone it has all memory.
        """
        longest = max(len(each.ids) for each in (sequence, *others))
        num_answer = min(sequence.request.max_new_tokens, USUAL_TOKENS)
        num_new = (len(others) + 1) * (longest + num_answer) - num_held
        at_once = LEAST_TOKENS if self._can_chunk else len(sequence.ids)
        return not others or self.room.has_room(num_new, at_once)

    def prefill(
        self,
        sequence: Running,
        others: Callable[[], None],
        *,
        is_alone: bool = False,
        is_awaited: bool = False,
    ) -> Tensor:
        """Compute the next chunk of a prompt that has begun, or of all tokens of an answer that
        begins anew: [V] float32 logits of its last token. `others` is called between layers;
        `is_alone`: none has a seat yet; `is_awaited`: some wait for one.
        """
        prompt_ids = sequence.ids
        self.room.limit_blocks(None if is_alone else self._tokens_in(self._gap_share_s))
        if not is_alone and self.room.takes_blocks(num_left_of(sequence)):
            self.keep_blocks_short()
        assert sequence.cache is not None
        cache = sequence.cache
        start = sequence.num_prefilled
        end = start + self._num_at_once(sequence, is_alone, is_awaited)
        is_end = end == len(prompt_ids)
        can_stop = self._can_chunk and self.num_seats > 1 and self.lengths.is_usual(len(prompt_ids))
        if sequence.branch is not None and can_stop:
            end, is_end = self.prefixes.pass_end(sequence.branch, key_of(sequence), start, end)
        images = sequence.request.images
        if images is not None and (whole := images.end_of_span(end)) > end:
            end = whole
            is_end = end == len(prompt_ids)
        chunk = prompt_ids[start:end]
        inputs = {
            "input_ids": torch.tensor([chunk], dtype=torch.long, device="cpu"),
            "attention_mask": torch.ones((1, start + len(chunk)), dtype=torch.long, device="cpu"),
            "position_ids": torch.arange(start, start + len(chunk), device="cpu")[None],
            "cache": cache,
            "num_forgotten": sequence.num_forgotten,  # not the model's
            **image_inputs(sequence, self._moe.model, start, end),
        }
        step = self._step(Phase.PREFILL, [sequence] * len(chunk), chunk)
        began = time.perf_counter()
        logits_V = self._read(sequence, step, inputs | {"others": others})
        if len(chunk) >= USUAL_TOKENS:  # short ones take what reading experts takes
            self._token_layer_s = (time.perf_counter() - began) / len(chunk) / self._num_layers
        sequence.num_prefilled += len(chunk)
        if images is not None and sequence.is_prefilled and not self.lengths.begins_anew:
            images.leave()
        if sequence.branch is not None:
            sequence.branch.note(self._moe.last_routing())
            key = key_of(sequence)
            self.prefixes.extend(sequence.branch, key, cache, 0, end, is_end=is_end)
            if self.prefixes.needs_windows:
                cut_windows(cache, is_last=sequence.is_prefilled)
        return logits_V

    def _tokens_in(self, layer_s: float) -> int | None:
        """Tokens of a prompt that a layer computes in this time, by the pace of the last pass; None
        before any has told.
        """
        return int(layer_s / self._token_layer_s) if self._token_layer_s else None

    def keep_blocks_short(self) -> None:
        """Let those that decode not wait too long for the next blocks of the pass under way: they
        have as few tokens as blocks may have before any pass has told its pace.
        """
        self.room.limit_blocks(self._tokens_in(self._gap_share_s) or 0)

    def _num_at_once(self, sequence: Running, is_alone: bool, is_awaited: bool) -> int:
        """Raises QueueFull if memory is short."""
        length = len(sequence.ids)
        num_left = length - sequence.num_prefilled
        if not (self._can_chunk and self.lengths.is_usual(length)):
            return num_left  # a chunk would begin anew, or not see how long the whole is
        if self._chunk is not None and (self.num_seats > 1 or sequence.request.reads_all):
            return min(self._chunk, num_left)
        most = num_left
        if sequence.request.reads_all or (self.num_seats > 1 and self.room.has_all):
            most = USUAL_TOKENS
        elif self.num_seats > 1:
            is_long = (is_alone and not is_awaited) or self.room.takes_blocks(num_left)
            layer_s = PASS_S / self._num_layers if is_long else self._gap_share_s
            unknown = FIRST_PASS_TOKENS if is_long else USUAL_TOKENS
            in_time = self._tokens_in(layer_s)
            most = max(USUAL_TOKENS, unknown if in_time is None else in_time)
        at_once = partial(self.room.tokens_at_once, num_left, length, most)
        # Others may come during the pass; one that fits only without them is not refused.
        fitting = at_once(is_alone=self.num_seats == 1) or at_once(is_alone=is_alone)
        if fitting == 0:
            raise QueueFull("there is no memory for this prompt: try again later")
        return fitting

    def _read(self, sequence: Running, step: Step, inputs: dict[str, Any]) -> Tensor:
        """Compute a chunk, and what its request wants of the prompt's own tokens."""
        request = sequence.request
        start = sequence.num_prefilled
        end = start + inputs["input_ids"].shape[1]
        if request.has_prompt_logprobs and not sequence.has_answer:
            if (needs := self.room.needs) is not None:  # a pass makes room for one row of logits
                num_tokens = end - start
                self.room.keep_free(needs.of_pass(num_tokens, end) + num_tokens * needs.logits)
            logits_TV = self._logits(step, inputs, num_kept=0)[0]
            require_number(self._moe, logits_TV.amax().item())
            first = [ChosenToken(request.prompt_ids[0])] if start == 0 else []
            next_ids = request.prompt_ids[start + 1 : end + 1]
            num_alternatives = request.sampling.num_logprobs or 0
            sequence.echo([*first, *prompt_logprobs(logits_TV, next_ids, num_alternatives)])
            return logits_TV[-1].to("cpu", copy=True, dtype=torch.float32)
        if sequence.embedding is not None:
            with last_hidden_states(self._moe.model) as states:
                logits_1V = self._forward(step, inputs)
            sequence.embedding.add(states[-1][0])  # other passes may have run inside
        else:
            logits_1V = self._forward(step, inputs)
        if request.echo:
            sequence.echo([ChosenToken(i) for i in request.prompt_ids[sequence.num_echoed : end]])
        return logits_1V[0]

    def _is_read_apart(self, sequence: Running) -> bool:
        """True if a prompt begins with nothing that is known."""
        has_none = self.prefixes.num_bytes == 0 or sequence.num_forgotten > 0
        return has_none or sequence.request.reads_all

    def num_to_compute(self, sequence: Running) -> int:
        """How many tokens of a prompt passes have to read."""
        if sequence.cache is not None or self._is_read_apart(sequence):
            return num_left_of(sequence)
        known = key_of(sequence)[:-1]
        return len(sequence.ids) - self.prefixes.num_known(self._owner_of(sequence), known)

    def _owner_of(self, sequence: Running) -> Hashable:
        return sequence.request.owner, self.lengths.regime(len(sequence.ids))

    def begin(self, sequence: Running) -> int:
        """Give a sequence its cache, unless it has one, with what is known of its prompt. Returns
        how many tokens that are. Its last token is computed in any case: there is no first token
        without its logits.
        """
        if sequence.cache is not None:
            return 0
        cache = new_cache(self._moe.model.config, self._moe.config.kv_dtype)
        sequence.cache = cache
        if self._is_read_apart(sequence):
            return 0
        nodes = self._known(sequence)
        if nodes:
            self.prefixes.fill(cache, nodes, self._moe.model.device)
            sequence.num_prefilled = sum(len(node.tokens) for node in nodes)
            if not sequence.has_answer:
                sequence.num_cached = sequence.num_prefilled
            experts = [node.experts for node in nodes if node.experts is not None]
            if len(experts) == len(nodes):
                known_ids = sequence.ids[: sequence.num_prefilled]
                step = self._step(Phase.PREFILL, [sequence] * len(known_ids), known_ids)
                self._moe.note_known(step, np.concatenate(experts).astype(np.int64))
        if self.prefixes.needs_windows:
            keep_windows(cache)
        return sequence.num_prefilled

    def _known(self, sequence: Running) -> list[Node]:
        """The blocks with which a sequence begins, and which end beside an image, not within it."""
        known = key_of(sequence)[:-1]
        images = sequence.request.images
        while True:
            sequence.branch = self.prefixes.branch(self._owner_of(sequence))
            nodes = self.prefixes.find(sequence.branch, known)
            end = sum(len(node.tokens) for node in nodes)
            place = end if images is None else images.begin_of_span(end)
            if place == end:
                return nodes
            known = known[:place]

    def decode(self, sequences: Sequence[Running], batch: DecodeBatch) -> Tensor:
        """Compute one token of each sequence. Returns [B, V] float32 logits.

        If this raises, the caller must undo the batch's step or drop the batch.
        """
        token_ids = [sequence.last_id for sequence in sequences]
        batch.begin_step()
        step = self._step(Phase.DECODE, sequences, token_ids)
        inputs = batch.inputs(token_ids)
        inputs["position_ids"] = answer_positions(sequences, inputs["position_ids"])
        logits_BV = self._forward(step, inputs)
        batch.grow()
        if self.prefixes.num_bytes > 0:
            experts_BLK = self._moe.last_routing()
            for row, sequence in enumerate(sequences):
                self._leave_branch(sequence)
                if sequence.branch is not None:
                    own = None if experts_BLK is None else experts_BLK[row : row + 1]
                    sequence.branch.note(own)
                    self.keep_answer(sequence, batch, row)
        return logits_BV

    def _leave_branch(self, sequence: Running) -> None:
        """Keep nothing more of a sequence whose tokens are not computed as its first were."""
        length = len(sequence.ids)
        if self.lengths.regime(length) != self.lengths.regime(length - 1):
            sequence.branch = None

    def keep_answer(
        self, sequence: Running, batch: DecodeBatch, row: int, *, is_end: bool = False
    ) -> None:
        """Give the prefix cache what it keeps of a sequence, whose tokens are in this row."""
        if sequence.branch is not None and batch.cache is not None:
            length = batch.lengths[row]
            self.prefixes.extend(
                sequence.branch, key_of(sequence), batch.cache, row, length, is_end=is_end
            )

    def _forward(self, step: Step, inputs: dict[str, Any]) -> Tensor:
        """[B, V] float32 logits of the last token, on the CPU: there the tokens are chosen."""
        logits_BTV = self._logits(step, inputs, num_kept=1)
        logits_BV = logits_BTV[:, -1].to("cpu", copy=True, dtype=torch.float32)
        require_number(self._moe, logits_BV.numpy().max())  # 15 us for 150,000
        return logits_BV

    def _logits(self, step: Step, inputs: dict[str, Any], num_kept: int) -> Tensor:
        """[B, T, V] logits of at least the last `num_kept` tokens, 0 for all, as the model gives
        them.
        """
        self.lengths.forget()
        inputs |= {"use_cache": True, "logits_to_keep": num_kept}
        accepted = {name: value for name, value in inputs.items() if name in self._accepts}
        others = inputs.get("others", lambda: None)
        logits_BTV: Tensor = self._moe.forward(step, others=others, **accepted).logits
        num_tokens = inputs["attention_mask"].shape[1] - inputs.get("num_forgotten", 0)
        if not has_tokens(inputs["cache"], num_tokens):
            raise UnsupportedModelError(
                f"a forward pass left the KV cache without its tokens; expected {num_tokens}\n"
                "hint: the model ignores the cache; generate() with use_cache=False may run it"
            )
        return logits_BTV

    def _step(self, phase: Phase, owners: Sequence[Running], token_ids: Sequence[int]) -> Step:
        """The step for the recorder. `owners` has the sequence of each token."""
        sequence_T = np.array([owner.seat for owner in owners])
        begins_B = np.zeros(self.num_seats, dtype=bool)
        begins_B[sequence_T] = [not owner.is_known for owner in owners]
        for owner in owners:
            owner.is_known = True
        return Step(
            phase=phase,
            num_sequences=self.num_seats,
            tokens_per_sequence=1,
            begins_B=begins_B,
            token_ids_T=np.array(token_ids),
            sequence_T=sequence_T,
            context=max(len(owner.ids) for owner in owners),
        )


@contextmanager
def last_hidden_states(model: Any) -> Iterator[list[Tensor]]:
    """Gives a list that gets, for each pass inside, what the model makes its logits of: [B, T, d].

    Raises NoEmbeddings for a model that makes them of something else.
    """
    decoder = model.get_decoder()
    if decoder is model:
        raise NoEmbeddings("this model has no hidden states of its own: there are no embeddings")
    states: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        state = getattr(output, "last_hidden_state", None)
        if state is None:
            raise NoEmbeddings("this model does not give its hidden states")
        states.append(state)

    hook = decoder.register_forward_hook(keep)
    try:
        yield states
    finally:
        hook.remove()
