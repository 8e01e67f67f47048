"""Counts of the engine."""

from __future__ import annotations

from dataclasses import dataclass


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
    steps: int = 0
    stepping_s: float = 0.0  # in all of these steps
