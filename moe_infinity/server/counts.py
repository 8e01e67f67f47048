"""Counts of the engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from moe_infinity.server.sampling import Constraint

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineCounts:
    """How sequences ended, and how much was computed, since the engine was made."""

    finished: int = 0
    cancelled: int = 0
    expired: int = 0  # at their deadline
    failed: int = 0
    refused: int = 0  # because the queue was full
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, not computed, because the prefix cache had them
    generated_tokens: int = 0
    masks: int = 0  # of tokens that a grammar allows
    masking_s: float = 0.0  # for all of these masks
    cut: int = 0  # answers, as memory had no room for more of their keys and values
    steps: int = 0
    stepping_s: float = 0.0  # in all of these steps

    def note_masks(self, constraint: Constraint | None) -> None:
        """Count the masks of an answer that has ended."""
        if constraint is not None and constraint.num_masks:
            self.masks += constraint.num_masks
            self.masking_s += constraint.masking_s
            mean_us = constraint.masking_s / constraint.num_masks * 1e6
            logger.info("%d masks of a grammar, %.0f us each", constraint.num_masks, mean_us)
