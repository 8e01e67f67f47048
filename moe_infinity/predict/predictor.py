"""How likely each expert is to be activated the next time its row comes.

Evidence is a product of odds: each factor says how much likelier than its base rate an expert is,
and a small logistic model, learned online, says how far each factor is to be trusted.

    base        how often the expert is used at all
    request     how often this request used it lately           (moving average)
    transition  the last token's experts of this row            -> the next token's
    next_token  the last token's id                             -> the next token's experts
    eamc        what the most similar earlier requests used     (EAM Collection)
    token       this token's id -> its experts                  known when a step starts
    layer       this token's experts of the row before          known one row ahead
    gate        the row's own router, asked early               known one row ahead, if at all

A prediction is made at three stages: for the *next* token right after a row was routed, for the
token that is *now* beginning, and for the row *ahead*. What each factor is worth:
docs/experiments.md. R MoE rows, E experts, K experts per token, T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moe_infinity.experts import Ints, Phase, Step
from moe_infinity.predict.eam import RequestEam
from moe_infinity.predict.eamc import Eamc, EamcMatch
from moe_infinity.predict.tables import Floats, FollowTable, TokenTable

FACTORS = ("request", "transition", "next_token", "eamc", "token", "layer", "gate")
BASE, BIAS, REQUEST, TRANSITION, NEXT_TOKEN, EAMC, TOKEN, LAYER, GATE = range(NUM_PLANES := 9)
PLANE = dict(zip(FACTORS, range(REQUEST, NUM_PLANES), strict=True))
NEXT, NOW, AHEAD = range(3)

# Where learning starts: about what a prototype with weights per row converged to, on average over
# rows, on development requests of gpt-oss; the gate's weight is a guess, as no trace has one.
START_WEIGHTS = np.array(
    [  # base bias request transition next_token eamc token layer gate
        [1.0, -0.2, 0.35, 1.1, 0.6, 0.0, 0.0, 0.0, 0.0],
        [1.0, -0.3, 0.3, 0.9, 0.2, 0.0, 0.8, 0.0, 0.0],
        [1.0, -0.5, 0.3, 0.1, 0.2, 0.0, 0.6, 1.4, 3.0],
    ],
    dtype=np.float32,
)
KNOWN = np.tri(3, NUM_PLANES, TOKEN - 1, dtype=np.float32)  # what each stage can know
KNOWN[AHEAD] = 1
LEARNING_RATE = 0.004  # of the weights, per token, divided by the number of rows
REQUEST_RATE = 0.06  # of the moving average of a request, per token
BASE_RATE = 0.0005  # of the base rate, per token, once some thousands of tokens were seen
TAIL = 64  # tokens of a prompt, the last ones, that are learned from
FORGET_EVERY = 64  # steps between two looks for full counters
MATCH_EVERY = 8  # steps between two matches with the collection
NUM_NEAREST = 5
EAMC_CAPACITY = 120  # paper §9.6: the plateau
LEAST = np.float32(1e-4)  # of a probability, before its logarithm is taken
KEPT, ADDED = np.float32(1 - REQUEST_RATE), np.float32(REQUEST_RATE)


class Predictor:
    """Learns from every step and predicts the next; used for eviction and for prefetch.

    `without` names FACTORS to leave out.
    """

    def __init__(self, num_rows: int, num_experts: int, *, without: Sequence[str] = ()) -> None:
        self.num_rows, self.num_experts = num_rows, num_experts
        self.eamc = Eamc(EAMC_CAPACITY, num_rows, num_experts)
        self.transitions = FollowTable(num_rows, num_experts)
        self.layers = FollowTable(num_rows, num_experts)  # row 0 follows nothing
        self.tokens = TokenTable(num_rows, num_experts)
        self.uses = frozenset(FACTORS) - set(without)
        self._mask = KNOWN.copy()
        for name in without:
            self._mask[:, PLANE[name]] = 0
        self.weights = START_WEIGHTS * self._mask
        self.base_RE = np.full((num_rows, num_experts), 1 / num_experts, dtype=np.float32)
        self.log_base_RE = np.log(self.base_RE)
        self.num_tokens = 0  # learned from so far
        # The chance that any running sequence activates the expert when its row comes next, and at
        # each later time.
        self.next_use_RE = self.base_RE.copy()
        self.later_use_RE = self.base_RE.copy()
        self._num_steps = 0
        self._runs: list[SequencePredictor] = []
        self._sequence_of_token_T: Ints | None = None

    def begin_step(self, step: Step, ended: Sequence[RequestEam] = ()) -> None:
        """A forward pass begins; `ended` are the requests whose place it takes."""
        for run in self._runs:
            run.learn(self)
        self._num_steps += 1
        if self._num_steps % FORGET_EVERY == 0:
            self.transitions.forget()
            self.layers.forget()
        if "eamc" in self.uses:
            for eam in ended:
                self.eamc.add(eam)
        if len(self._runs) != step.num_sequences:
            runs = [SequencePredictor(self) for _ in range(step.num_sequences)]
            if len(runs) == 1:  # what the one needs, all need
                self.next_use_RE, self.later_use_RE = runs[0].chance_RE, runs[0].recent_RE
            else:
                self.next_use_RE = np.zeros_like(self.base_RE)
                self.later_use_RE = np.zeros_like(self.base_RE)
            self._runs = runs  # last: interrupted before this, the next step starts over
        sequence_T = step.sequence_of_token_T
        token_ids_T = step.counted_token_ids_T
        is_one_each = len(sequence_T) == step.num_sequences == 1
        self._sequence_of_token_T = None if is_one_each else sequence_T
        np.log(self.base_RE, out=self.log_base_RE)
        for sequence, run in enumerate(self._runs):
            if step.begins_B[sequence]:
                run.begin(self)
            mine = slice(None) if is_one_each else sequence_T == sequence
            run.begin_step(self, step.phase, token_ids_T[mine])
        self._unite(slice(None))

    def finish(self, running: Sequence[RequestEam]) -> None:
        """No more steps come: learn from the last one and keep the requests it belonged to."""
        for run in self._runs:
            run.learn(self)
        for eam in running:
            self.eamc.add(eam)

    def take_over(self, eamc: Eamc, base_RE: Floats, weights: Floats, num_tokens: int) -> None:
        """Go on from what an earlier predictor learned; no step has begun yet."""
        self.eamc, self.num_tokens = eamc, num_tokens
        self.base_RE[:] = base_RE
        self.weights = weights * self._mask

    def observe(self, moe_layer_idx: int, experts_TK: Ints) -> None:
        """The routing of the counted tokens in one row of this step."""
        sequence_T = self._sequence_of_token_T
        if sequence_T is None:
            self._runs[0].observe(self, moe_layer_idx, experts_TK)
        else:
            for sequence, run in enumerate(self._runs):
                mine_TK = experts_TK[sequence_T == sequence]
                if len(mine_TK):
                    run.observe(self, moe_layer_idx, mine_TK)
        self._unite(slice(moe_layer_idx, moe_layer_idx + 1))

    def hint(self, moe_layer_idx: int, experts_TK: Ints) -> None:
        """What the router of a row not yet reached said of the counted tokens when asked early."""
        if "gate" in self.uses:
            sequence_T = self._sequence_of_token_T
            for sequence, run in enumerate(self._runs):
                mine = slice(None) if sequence_T is None else sequence_T == sequence
                run.hint(moe_layer_idx, experts_TK[mine])

    def look_ahead(self, moe_layer_idx: int) -> None:
        """Refine the row after this one, just observed, by what it was routed to."""
        if self.uses & {"layer", "gate"} and 0 <= moe_layer_idx < self.num_rows - 1:
            for run in self._runs:
                run.look_ahead(self, moe_layer_idx)
            self._unite(slice(moe_layer_idx + 1, moe_layer_idx + 2))

    def _unite(self, rows: slice) -> None:
        """What any sequence needs: one minus the chance that none does."""
        if len(self._runs) > 1:
            self.next_use_RE[rows] = _any_of([run.chance_RE[rows] for run in self._runs])
            self.later_use_RE[rows] = _any_of([run.recent_RE[rows] for run in self._runs])

    def add_token_evidence(self, factor: str, token_id: int, out_RE: Floats) -> None:
        """What is known of the experts of a token, or of the token after it; zero if nothing."""
        evidence_RE = None
        if factor in self.uses:
            evidence_RE = self.tokens.evidence(
                token_id,
                after=factor == "next_token",
                base_RE=self.base_RE,
                log_base_RE=self.log_base_RE,
            )
        out_RE[:] = 0 if evidence_RE is None else evidence_RE

    def learn_weights(
        self, features_FRE: Floats, used_RE: Floats, is_refined_R: NDArray[np.bool_]
    ) -> None:
        """One gradient step of the log loss for all three stages at once; AHEAD only from rows that
        were predicted at that stage.
        """
        features = features_FRE.reshape(len(features_FRE), -1)
        error = used_RE.reshape(-1) - _sigmoid(self.weights @ features)
        error.reshape(-1, *used_RE.shape)[AHEAD, ~is_refined_R] = 0
        step = error @ features.T
        step *= self._mask * np.float32(LEARNING_RATE / self.num_rows)
        self.weights += step

    def learn_base(self, used_RE: Floats) -> None:
        self.num_tokens += 1
        rate = max(BASE_RATE, 1 / (self.num_tokens + 4))
        self.base_RE += np.float32(rate) * (used_RE - self.base_RE)
        np.maximum(self.base_RE, np.float32(LEAST), out=self.base_RE)


class SequencePredictor:
    """One running sequence: its features, and the chances that follow from them."""

    def __init__(self, model: Predictor) -> None:
        rows, experts = model.num_rows, model.num_experts
        # Features of this step's predictions, and of the next step's, made as rows pass.
        self._now_FRE = np.zeros((NUM_PLANES, rows, experts), dtype=np.float32)
        self._next_FRE = np.zeros((NUM_PLANES, rows, experts), dtype=np.float32)
        self.chance_RE = np.zeros((rows, experts), dtype=np.float32)
        self.recent_RE = np.zeros((rows, experts), dtype=np.float32)
        self._match = {phase: EamcMatch(model.eamc, phase) for phase in Phase}
        self._rows = np.arange(rows)[:, None]
        self._logs_FE = np.empty((2, experts), dtype=np.float32)
        self._phase = Phase.PREFILL
        self._before_RK: Ints | None = None  # experts of the last token of the step before
        self._before_id = -1
        self._experts: dict[int, Ints] = {}  # [T, K] of each row passed in this step
        self._is_refined_R = np.zeros(rows, dtype=bool)  # by what is known one row ahead
        self._times_passed_R = np.zeros(rows, dtype=int)  # by decode steps, since it last ran
        self._token_ids_T: Ints = np.zeros(0, dtype=np.int64)
        self.begin(model)

    def begin(self, model: Predictor) -> None:
        """A new request: nothing is known but what is true of all."""
        for features_FRE in (self._now_FRE, self._next_FRE):
            features_FRE[:] = 0
            features_FRE[BASE] = model.log_base_RE
            features_FRE[BIAS] = 1
        self.recent_RE[:] = self.chance_RE[:] = model.base_RE
        self._before_RK, self._before_id = None, -1
        self._num_steps, self._has_decoded = 0, False
        for match in self._match.values():
            match.begin()

    def begin_step(self, model: Predictor, phase: Phase, token_ids_T: Ints) -> None:
        self._forget_idle_rows(phase)
        self._phase, self._token_ids_T = phase, token_ids_T
        self._experts = {}
        self._is_refined_R[:] = False
        if not len(token_ids_T):
            if phase is Phase.DECODE:  # it has ended while others of its batch go on
                self.chance_RE[:] = self.recent_RE[:] = 0
            return
        self._now_FRE, self._next_FRE = self._next_FRE, self._now_FRE
        now_FRE, next_FRE = self._now_FRE, self._next_FRE
        next_FRE[BASE] = model.log_base_RE
        model.add_token_evidence("token", int(token_ids_T[0]), now_FRE[TOKEN])
        model.add_token_evidence("next_token", int(token_ids_T[-1]), next_FRE[NEXT_TOKEN])
        now_FRE[LAYER:] = 0
        if "eamc" in model.uses:
            if self._num_steps < MATCH_EVERY or self._num_steps % MATCH_EVERY == 0:
                now_FRE[EAMC] = self._evidence_of_others(model)
            next_FRE[EAMC] = now_FRE[EAMC]
        self._num_steps += 1
        odds = model.weights[NOW].dot(now_FRE.reshape(NUM_PLANES, -1))
        self.chance_RE[:] = _sigmoid(odds).reshape(self.chance_RE.shape)
        self.chance_RE[self._times_passed_R > 1] = LEAST

    def _forget_idle_rows(self, phase: Phase) -> None:
        """Rows that decoding passed by twice, such as an encoder's, it will pass by again. (Once
        may have been an interruption.)
        """
        if phase is Phase.PREFILL:
            self._times_passed_R[:] = 0
        elif self._phase is Phase.DECODE and self._experts:
            self._times_passed_R += 1
            self._times_passed_R[list(self._experts)] = 0
            self.recent_RE[self._times_passed_R > 1] = LEAST

    def _evidence_of_others(self, model: Predictor) -> Floats:
        """[R, E]: log of how much likelier the most similar requests make each expert. Decoding is
        matched with decoding; before its first token, the prompt with prompts.
        """
        match = self._match[Phase.DECODE if self._has_decoded else Phase.PREFILL]
        if not model.eamc.num_stored:
            return np.zeros_like(model.base_RE)
        share_RE = match.predict(NUM_NEAREST)
        top_k = model.base_RE.sum(axis=1, keepdims=True)
        mixed_RE = 0.9 * top_k * share_RE + 0.1 * model.base_RE
        evidence_RE: Floats = (np.log(mixed_RE) - model.log_base_RE).astype(np.float32)
        return evidence_RE

    def observe(self, model: Predictor, row: int, experts_TK: Ints) -> None:
        """The routing of this sequence's tokens in one row."""
        self._experts[row] = experts_TK
        last_K, recent_E = experts_TK[-1], self.recent_RE[row]
        if len(experts_TK) == 1:
            recent_E *= KEPT
            recent_E[last_K] += ADDED
        else:
            self._observe_many(recent_E, experts_TK)
        logs_FE, next_FE = self._logs_FE, self._next_FRE[:, row]
        np.maximum(recent_E, LEAST, out=logs_FE[0])
        model.transitions.probabilities(row, last_K, model.base_RE[row], logs_FE[1])
        np.log(logs_FE, out=logs_FE)
        np.subtract(logs_FE, model.log_base_RE[row], out=next_FE[REQUEST : TRANSITION + 1])
        self.chance_RE[row] = _sigmoid(model.weights[NEXT].dot(next_FE))

    def hint(self, row: int, experts_TK: Ints) -> None:
        """The row's router, asked early, said this; 1 for what it chose."""
        self._now_FRE[GATE, row] = 0
        self._now_FRE[GATE, row, experts_TK.ravel()] = 1

    def look_ahead(self, model: Predictor, row: int) -> None:
        """Refine the row after the one just observed."""
        experts_TK = self._experts.get(row)
        if experts_TK is None:  # it has no token in this step
            return
        last_K, row = experts_TK[-1], row + 1
        self._is_refined_R[row] = True
        now_FE = self._now_FRE[:, row]
        follow_E = now_FE[LAYER]  # a view
        model.layers.probabilities(row, last_K, model.base_RE[row], follow_E)
        np.log(follow_E, out=follow_E)
        follow_E -= model.log_base_RE[row]
        self.chance_RE[row] = _sigmoid(model.weights[AHEAD].dot(now_FE))

    def _observe_many(self, recent_E: Floats, experts_TK: Ints) -> None:
        """The moving average over a prompt."""
        age_T = np.arange(len(experts_TK))[::-1]
        weight_T = REQUEST_RATE * (1 - REQUEST_RATE) ** age_T
        recent_E *= np.float32((1 - REQUEST_RATE) ** len(experts_TK))
        weight_P = weight_T.repeat(experts_TK.shape[1]).astype(np.float32)
        np.add.at(recent_E, experts_TK.ravel(), weight_P)

    def _match_step(self, num_rows: int) -> None:
        """Tell the match with earlier requests what this step activated."""
        match = self._match[self._phase]
        if len(self._token_ids_T) == 1:
            match.observe_all(np.concatenate([self._experts[row] for row in range(num_rows)]))
        else:
            for row, experts_TK in self._experts.items():
                match.observe(row, *np.unique(experts_TK, return_counts=True))
        self._has_decoded |= self._phase is Phase.DECODE

    def learn(self, model: Predictor) -> None:
        """The step is over: what it was like is what later ones are predicted from."""
        rows = model.num_rows
        if len(self._experts) != rows or len({e.shape for e in self._experts.values()}) != 1:
            return  # interrupted, or rows that do not choose alike
        if "eamc" in model.uses:
            self._match_step(rows)
        experts_TRK = np.stack([self._experts[row][-TAIL:] for row in range(rows)], axis=1)
        for token_id, experts_RK in zip(
            self._token_ids_T[-TAIL:].tolist(), experts_TRK, strict=True
        ):
            used_RE = np.zeros((rows, model.num_experts), dtype=np.float32)
            used_RE[self._rows, experts_RK] = 1
            if self._phase is Phase.DECODE and self._before_RK is not None:
                model.learn_weights(self._now_FRE, used_RE, self._is_refined_R)
            model.learn_base(used_RE)
            model.layers.learn(experts_RK[:-1], experts_RK[1:], first_row=1)
            model.tokens.learn(token_id, experts_RK, after=False)
            if self._before_RK is not None:
                model.transitions.learn(self._before_RK, experts_RK)
                model.tokens.learn(self._before_id, experts_RK, after=True)
            self._before_RK, self._before_id = experts_RK, token_id
        self._experts = {}


LOWEST_ODDS = np.float32(-30)


def _sigmoid(odds: Floats) -> Floats:
    """In place; log odds below -30 are as good as never."""
    np.maximum(odds, LOWEST_ODDS, out=odds)
    np.negative(odds, out=odds)
    np.exp(odds, out=odds)
    odds += 1
    chances: Floats = np.reciprocal(odds, out=odds)
    return chances


def _any_of(chances: Sequence[Floats]) -> Floats:
    """The chance of at least one of independent events."""
    none = 1 - chances[0]
    for chance in chances[1:]:
        none *= 1 - chance
    return 1 - none
