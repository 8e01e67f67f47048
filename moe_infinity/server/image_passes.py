"""Images in a pass: the key by which prefixes are compared, inputs of the model, and positions.

Legend: B sequences, R rows of positions (4 of M-RoPE models).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moe_infinity.server.sequences import Running


def key_of(sequence: Running) -> Sequence[int]:
    """Return what stands for a sequence's tokens where prefixes are compared."""
    images = sequence.request.images
    return sequence.ids if images is None else images.key_of(sequence.ids)


def image_inputs(sequence: Running, model: Any, start: int, end: int) -> dict[str, Tensor]:
    """Return what a model takes for a chunk of a prompt because of its images, if it has any."""
    images = sequence.request.images
    if images is None:
        return {}
    positions = images.positions_of(model, sequence.request.prompt_ids)
    return {**images.inputs(start, end), "position_ids": positions[..., start:end]}


def answer_positions(sequences: Sequence[Running], lengths_B1: Tensor) -> Tensor:
    """[B, 1] or [R, B, 1], the positions of one new token of each sequence. `lengths_B1`: of their
    tokens so far.
    """
    images = [each.request.images for each in sequences]
    offsets = [None if each is None else each.offset for each in images]
    rows = max((len(each) for each in offsets if each is not None), default=1)
    if rows == 1:
        return lengths_B1
    none = torch.zeros((rows, 1), dtype=torch.long, device="cpu")
    offset_RB = torch.cat([none if each is None else each for each in offsets], dim=1)
    return lengths_B1 + offset_RB[:, :, None]
