"""Predicts how likely each expert is to be activated the next time its MoE layer runs.

Evidence is a product of odds: each factor says how much likelier than its base rate an expert is,
and a small logistic model, learned online, says how far each factor is to be trusted.

    base        how often the expert is used at all
    request     how often this request used it lately           (moving average)
    transition  the last token's experts of this layer          -> the next token's
    next_token  the last token's id                             -> the next token's experts
    eamc        the experts of the most similar earlier requests     (EAM Collection)
    token       this token's id -> its experts                  known when a step starts
    layer       this token's experts of the layer before        known one layer ahead
    router      the layer's own router, asked early             known one layer ahead, if at all

A prediction is made at three stages: for the *next* token right after a layer was routed, for the
token that is beginning *now*, and for the layer *ahead*. docs/experiments.md says how much each
factor is worth. L MoE layers, E experts, K experts per token, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_infinity.cache.policies import ACTIVATION_AWARE, POLICIES
from moe_infinity.config import OffloadConfig
from moe_infinity.errors import ConfigError
from moe_infinity.experts import Ints, Step
from moe_infinity.predict.eamc import RequestEam
from moe_infinity.predict.sequence_predictor import SequencePredictor
from moe_infinity.predict.tables import FACTORS, Floats, Knowledge

FORGET_EVERY = 64  # steps between two looks for full counters


class Predictor(Knowledge):
    """Learns from every step and predicts the next. Both eviction and prefetch use it.

    `without` names FACTORS to leave out.
    """

    def __init__(self, num_layers: int, num_experts: int, *, without: Sequence[str] = ()) -> None:
        super().__init__(num_layers, num_experts, without=without)
        # The chance that any running sequence activates an expert: when its layer runs next, and at
        # each later time.
        self.next_use_LE: Floats = self.base_LE.copy()
        self.later_use_LE: Floats = self.base_LE.copy()
        self._num_steps = 0
        self._sequences: list[SequencePredictor] = []
        self._sequence_of_token_T: Ints | None = None  # None: all tokens are of the only sequence

    def begin_step(self, step: Step, ended: Sequence[RequestEam] = ()) -> None:
        """Begin a forward pass; `ended` are the requests that it replaces."""
        self._learn(ended)
        if len(self._sequences) != step.num_sequences:
            self._make_sequences(step.num_sequences)
        sequence_T = step.sequence_of_token_T
        token_ids_T = step.counted_token_ids_T
        is_one_token = len(sequence_T) == step.num_sequences == 1
        self._sequence_of_token_T = None if is_one_token else sequence_T
        np.log(self.base_LE, out=self.log_base_LE)
        for idx, sequence in enumerate(self._sequences):
            if step.begins_B[idx]:
                sequence.begin(self)
            mine = slice(None) if is_one_token else sequence_T == idx
            sequence.begin_step(self, step.phase, token_ids_T[mine])
        self._combine_sequences(slice(None))

    def _learn(self, ended: Sequence[RequestEam]) -> None:
        """Learn from the last step and from requests that ended."""
        for sequence in self._sequences:
            sequence.learn(self)
        self._num_steps += 1
        if self._num_steps % FORGET_EVERY == 0:
            self.transitions.forget()
            self.layers.forget()
        if "eamc" in self.factors:
            for eam in ended:
                self.eamc.add(eam)

    def _make_sequences(self, num_sequences: int) -> None:
        sequences = [SequencePredictor(self) for _ in range(num_sequences)]
        if num_sequences == 1:  # its chances are those of the batch
            self.next_use_LE = sequences[0].chance_LE
            self.later_use_LE = sequences[0].recent_LE
        else:
            self.next_use_LE = np.zeros_like(self.base_LE)
            self.later_use_LE = np.zeros_like(self.base_LE)
        self._sequences = sequences  # last: interrupted before this, the next step starts over

    def finish(self, running: Sequence[RequestEam]) -> None:
        """No more steps come: learn from the last one and keep the requests it belonged to."""
        for sequence in self._sequences:
            sequence.learn(self)
        for eam in running:
            self.eamc.add(eam)

    def observe(self, moe_layer_idx: int, top_k_index_TK: Ints) -> None:
        """The routing of the counted tokens in one layer of this step."""
        sequence_T = self._sequence_of_token_T
        if sequence_T is None:
            self._sequences[0].observe(self, moe_layer_idx, top_k_index_TK)
        else:
            for idx, sequence in enumerate(self._sequences):
                mine_TK = top_k_index_TK[sequence_T == idx]
                if len(mine_TK):
                    sequence.observe(self, moe_layer_idx, mine_TK)
        self._combine_sequences(slice(moe_layer_idx, moe_layer_idx + 1))

    def hint(self, moe_layer_idx: int, top_k_index_TK: Ints) -> None:
        """Note the experts that the router of a layer chose for the counted tokens when it was
        asked early.
        """
        sequence_T = self._sequence_of_token_T
        for idx, sequence in enumerate(self._sequences):
            mine = slice(None) if sequence_T is None else sequence_T == idx
            sequence.hint(moe_layer_idx, top_k_index_TK[mine])

    def look_ahead(self, moe_layer_idx: int) -> None:
        """Refine the chances of the layer after this one by the routing of this one."""
        can_refine = bool(self.factors & {"layer", "router"})
        if can_refine and 0 <= moe_layer_idx < self.num_layers - 1:
            for sequence in self._sequences:
                sequence.look_ahead(self, moe_layer_idx)
            self._combine_sequences(slice(moe_layer_idx + 1, moe_layer_idx + 2))

    def _combine_sequences(self, layers: slice) -> None:
        """The chance that any sequence needs an expert: one minus the chance that none does."""
        if len(self._sequences) > 1:
            next_use = [sequence.chance_LE[layers] for sequence in self._sequences]
            later_use = [sequence.recent_LE[layers] for sequence in self._sequences]
            self.next_use_LE[layers] = _any_of(next_use)
            self.later_use_LE[layers] = _any_of(later_use)


def _any_of(chances: Sequence[Floats]) -> Floats:
    """The chance of at least one of independent events."""
    none = 1 - chances[0]
    for chance in chances[1:]:
        none *= 1 - chance
    return 1 - none


def check_policy(config: OffloadConfig) -> None:
    """Raise ConfigError for an unknown policy, and for options that the policy does not serve."""
    policy = config.policy
    if policy not in POLICIES:
        raise ConfigError(
            f"unknown policy {policy!r}, expected one of: {', '.join(POLICIES)}; "
            "the baselines of `moe-infinity simulate` run in the simulator only"
        )
    predicts = policy == ACTIVATION_AWARE
    if config.prefetch and not predicts:
        raise ConfigError(
            f"policy {policy} predicts nothing, so it cannot prefetch; use {ACTIVATION_AWARE}"
        )
    if config.early_router and not config.prefetch:
        raise ConfigError(f"early_router serves prefetch=True with policy {ACTIVATION_AWARE}")
    if config.history is not None and not predicts:
        raise ConfigError(f"policy {policy} keeps no history, {ACTIVATION_AWARE} does")
    _check_without(config)


def _check_without(config: OffloadConfig) -> None:
    without = config.without
    is_list = isinstance(without, tuple | list)
    if not is_list or not all(name in FACTORS for name in without):
        raise ConfigError(f"without names some of {', '.join(FACTORS)}, not {without!r}")
    if without and config.policy != ACTIVATION_AWARE:
        raise ConfigError(f"policy {config.policy} has no factors to leave out")
    if without and config.history is not None:
        raise ConfigError("without is for ablation: it would spoil what the history keeps")
