"""The chances of one running sequence, and the features they are computed from.

L MoE layers, E experts, K experts per token, T tokens, F features.
"""

from __future__ import annotations

import numpy as np

from moe_infinity.experts import Ints, Phase, distinct
from moe_infinity.predict.eamc import EamcMatch
from moe_infinity.predict.tables import Feature, Floats, Knowledge, Stage, chances_of

REQUEST_RATE = 0.06  # of the moving average of a request, per token
KEPT = np.float32(1 - REQUEST_RATE)  # of that average, when a token comes
ADDED = np.float32(REQUEST_RATE)  # to that average, by a token
MOST_AVERAGED = 256  # tokens of a step; what earlier ones add is less than float32 can tell
TAIL = 64  # tokens of a prompt, the last ones, that are learned from
MATCH_EVERY = 8  # steps between two matches with the collection
NUM_NEAREST = 5  # requests of the collection that are asked
LEAST_CHANCE = np.float32(1e-4)  # before its logarithm is taken


class SequencePredictor:
    """One running sequence: its features, and the chances that follow from them."""

    def __init__(self, knowledge: Knowledge) -> None:
        num_layers = knowledge.num_layers
        num_experts = knowledge.num_experts
        shape_LE = (num_layers, num_experts)
        # Features of this step's predictions, and of the next step's, made as layers pass.
        self._now_FLE = np.zeros((len(Feature), *shape_LE), dtype=np.float32)
        self._next_FLE = np.zeros((len(Feature), *shape_LE), dtype=np.float32)
        self.chance_LE = np.zeros(shape_LE, dtype=np.float32)
        self.recent_LE = np.zeros(shape_LE, dtype=np.float32)
        self._match = {phase: EamcMatch(knowledge.eamc, phase) for phase in Phase}
        self._logs_FE = np.empty((2, num_experts), dtype=np.float32)
        self._phase = Phase.PREFILL
        self._before_LK: Ints | None = None  # experts of the last token of the step before
        self._before_id = -1
        self._experts: dict[int, Ints] = {}  # [T, K] of each layer passed in this step
        self._is_refined_L = np.zeros(num_layers, dtype=bool)  # by what is known one layer ahead
        self._times_passed_L = np.zeros(num_layers, dtype=int)  # by decode steps, since it last ran
        self._token_ids_T: Ints = np.zeros(0, dtype=np.int64)
        self.begin(knowledge)

    def begin(self, knowledge: Knowledge) -> None:
        """Begin a new request, of which nothing is known but what is true of all."""
        for features_FLE in (self._now_FLE, self._next_FLE):
            features_FLE[:] = 0
            features_FLE[Feature.BASE] = knowledge.log_base_LE
            features_FLE[Feature.BIAS] = 1
        self.recent_LE[:] = knowledge.base_LE
        self.chance_LE[:] = knowledge.base_LE
        self._before_LK = None
        self._before_id = -1
        self._num_steps = 0
        self._has_decoded = False
        for match in self._match.values():
            match.begin()

    def begin_step(self, knowledge: Knowledge, phase: Phase, token_ids_T: Ints) -> None:
        """A forward pass begins with these tokens of the sequence; none if it has ended."""
        self._forget_idle_layers(phase)
        self._phase = phase
        self._token_ids_T = token_ids_T
        self._experts = {}
        self._is_refined_L[:] = False
        if not len(token_ids_T):
            if phase is Phase.DECODE:  # it has ended while others of its batch go on
                self.chance_LE[:] = 0
                self.recent_LE[:] = 0
            return
        self._now_FLE, self._next_FLE = self._next_FLE, self._now_FLE
        now_FLE = self._now_FLE
        next_FLE = self._next_FLE
        next_FLE[Feature.BASE] = knowledge.log_base_LE
        knowledge.add_token_evidence(int(token_ids_T[0]), now_FLE[Feature.TOKEN], after=False)
        knowledge.add_token_evidence(int(token_ids_T[-1]), next_FLE[Feature.NEXT_TOKEN], after=True)
        now_FLE[Feature.LAYER :] = 0
        if "eamc" in knowledge.factors:
            if self._num_steps < MATCH_EVERY or self._num_steps % MATCH_EVERY == 0:
                now_FLE[Feature.EAMC] = self._eamc_evidence(knowledge)
            next_FLE[Feature.EAMC] = now_FLE[Feature.EAMC]
        self._num_steps += 1
        odds = knowledge.weights[Stage.NOW].dot(now_FLE.reshape(len(Feature), -1))
        self.chance_LE[:] = chances_of(odds).reshape(self.chance_LE.shape)
        self.chance_LE[self._times_passed_L > 1] = LEAST_CHANCE

    def _forget_idle_layers(self, phase: Phase) -> None:
        """Expect no use of layers that two decode steps left out, such as an encoder's. (Leaving
        them out once may have been an interruption.)
        """
        if phase is Phase.PREFILL:
            self._times_passed_L[:] = 0
        elif self._phase is Phase.DECODE and self._experts:
            self._times_passed_L += 1
            self._times_passed_L[list(self._experts)] = 0
            self.recent_LE[self._times_passed_L > 1] = LEAST_CHANCE

    def _eamc_evidence(self, knowledge: Knowledge) -> Floats:
        """[L, E]: the log of how much likelier the most similar requests make each expert. Decoding
        is matched with decoding. Before its first token, the prompt is matched with prompts.
        """
        match = self._match[Phase.DECODE if self._has_decoded else Phase.PREFILL]
        if not knowledge.eamc.num_stored:
            return np.zeros_like(knowledge.base_LE)
        share_LE = match.predict(NUM_NEAREST)
        top_k = knowledge.base_LE.sum(axis=1, keepdims=True)
        mixed_LE = 0.9 * top_k * share_LE + 0.1 * knowledge.base_LE
        evidence_LE: Floats = (np.log(mixed_LE) - knowledge.log_base_LE).astype(np.float32)
        return evidence_LE

    def observe(self, knowledge: Knowledge, moe_layer_idx: int, top_k_index_TK: Ints) -> None:
        """The routing of this sequence's tokens in one layer."""
        self._experts[moe_layer_idx] = top_k_index_TK
        last_K = top_k_index_TK[-1]
        recent_E = self.recent_LE[moe_layer_idx]
        if len(top_k_index_TK) == 1:
            recent_E *= KEPT
            recent_E[last_K] += ADDED
        else:
            self._observe_many(recent_E, top_k_index_TK)
        base_E = knowledge.base_LE[moe_layer_idx]
        log_base_E = knowledge.log_base_LE[moe_layer_idx]
        logs_FE = self._logs_FE
        next_FE = self._next_FLE[:, moe_layer_idx]
        np.maximum(recent_E, LEAST_CHANCE, out=logs_FE[0])
        knowledge.transitions.probabilities(moe_layer_idx, last_K, base_E, logs_FE[1])
        np.log(logs_FE, out=logs_FE)
        np.subtract(logs_FE, log_base_E, out=next_FE[Feature.REQUEST : Feature.TRANSITION + 1])
        self.chance_LE[moe_layer_idx] = chances_of(knowledge.weights[Stage.NEXT].dot(next_FE))

    def hint(self, moe_layer_idx: int, top_k_index_TK: Ints) -> None:
        """Note the experts that the router of this layer chose when it was asked early."""
        self._now_FLE[Feature.ROUTER, moe_layer_idx] = 0
        self._now_FLE[Feature.ROUTER, moe_layer_idx, top_k_index_TK.ravel()] = 1

    def look_ahead(self, knowledge: Knowledge, moe_layer_idx: int) -> None:
        """Refine the chances of the layer after this one, which was just observed."""
        top_k_index_TK = self._experts.get(moe_layer_idx)
        if top_k_index_TK is None:  # it has no token in this step
            return
        next_idx = moe_layer_idx + 1
        self._is_refined_L[next_idx] = True
        now_FE = self._now_FLE[:, next_idx]
        follow_E = now_FE[Feature.LAYER]  # a view
        base_E = knowledge.base_LE[next_idx]
        knowledge.layers.probabilities(next_idx, top_k_index_TK[-1], base_E, follow_E)
        np.log(follow_E, out=follow_E)
        follow_E -= knowledge.log_base_LE[next_idx]
        self.chance_LE[next_idx] = chances_of(knowledge.weights[Stage.AHEAD].dot(now_FE))

    def _observe_many(self, recent_E: Floats, top_k_index_TK: Ints) -> None:
        """The moving average over a prompt."""
        top_k_index_TK = top_k_index_TK[-MOST_AVERAGED:]
        age_T = np.arange(len(top_k_index_TK))[::-1]
        weight_T = REQUEST_RATE * (1 - REQUEST_RATE) ** age_T
        recent_E *= np.float32((1 - REQUEST_RATE) ** len(top_k_index_TK))
        weight_P = weight_T.repeat(top_k_index_TK.shape[1]).astype(np.float32)
        np.add.at(recent_E, top_k_index_TK.ravel(), weight_P)

    def _match_step(self, num_layers: int) -> None:
        """Add the experts that this step activated to the match with earlier requests."""
        match = self._match[self._phase]
        if len(self._token_ids_T) == 1:
            one_token = [self._experts[layer] for layer in range(num_layers)]
            match.observe_all(np.concatenate(one_token))
        else:
            for moe_layer_idx, top_k_index_TK in self._experts.items():
                match.observe(moe_layer_idx, *distinct(top_k_index_TK))
        self._has_decoded |= self._phase is Phase.DECODE

    def learn(self, knowledge: Knowledge) -> None:
        """The step is over: learn from its tokens, or from the last ones of a prompt."""
        num_layers = knowledge.num_layers
        shapes = {top_k_index_TK.shape for top_k_index_TK in self._experts.values()}
        if len(self._experts) != num_layers or len(shapes) != 1:
            return  # interrupted, or layers that do not choose alike
        if "eamc" in knowledge.factors:
            self._match_step(num_layers)
        last = [self._experts[layer][-TAIL:] for layer in range(num_layers)]
        experts_TLK = np.stack(last, axis=1)
        token_ids = self._token_ids_T[-TAIL:].tolist()
        for token_id, experts_LK in zip(token_ids, experts_TLK, strict=True):
            self._learn_token(knowledge, token_id, experts_LK)
        self._experts = {}

    def _learn_token(self, knowledge: Knowledge, token_id: int, experts_LK: Ints) -> None:
        used_LE = np.zeros((knowledge.num_layers, knowledge.num_experts), dtype=np.float32)
        np.put_along_axis(used_LE, experts_LK, 1, axis=1)
        if self._phase is Phase.DECODE and self._before_LK is not None:
            knowledge.learn_weights(self._now_FLE, used_LE, self._is_refined_L)
        knowledge.learn_base(used_LE)
        knowledge.layers.learn(experts_LK[:-1], experts_LK[1:], first_layer=1)
        knowledge.tokens.learn(token_id, experts_LK, after=False)
        if self._before_LK is not None:
            knowledge.transitions.learn(self._before_LK, experts_LK)
            knowledge.tokens.learn(self._before_id, experts_LK, after=True)
        self._before_LK = experts_LK
        self._before_id = token_id
