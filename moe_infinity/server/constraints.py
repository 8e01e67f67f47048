"""What a sequence may still say: the tokens that its grammar allows next. V tokens."""

from __future__ import annotations

import math
import time

import numpy as np
from llguidance import LLMatcher
from torch import Tensor

from moe_infinity.errors import MoEInfinityError


class ConstraintFailed(MoEInfinityError):
    """A grammar became too complex while an answer was generated, or allows no token at all."""


class Constraint:
    """The grammar of one sequence, and how far the sequence has come in it."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.num_masks = 0
        self.masking_s = 0.0  # for all of them

    def mask(self, logits_V: Tensor) -> None:
        """Set the logits of tokens that are not allowed to minus infinity.

        Raises ConstraintFailed.
        """
        began = time.perf_counter()
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._require_no_error()
        allowed_V = np.unpackbits(packed, count=len(logits_V), bitorder="little")
        if not allowed_V.any():
            raise ConstraintFailed("no token of the vocabulary is allowed by the grammar")
        # By numpy: torch would wait for its other threads, which a busy machine delays.
        logits_V.numpy()[allowed_V == 0] = -math.inf
        self.num_masks += 1
        self.masking_s += time.perf_counter() - began

    def take(self, token_id: int) -> None:
        """Go on behind a token that was allowed. Raises ConstraintFailed."""
        self._matcher.consume_token(token_id)
        self._require_no_error()

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""
        stopped: bool = self._matcher.is_stopped()
        return stopped

    def _require_no_error(self) -> None:
        if self._matcher.is_error():
            raise ConstraintFailed(self._matcher.get_error())
