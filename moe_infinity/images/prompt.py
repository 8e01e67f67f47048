"""The images of a prompt, as one value: from where the prompt becomes tokens to the forward pass.

    pictures, text --processor--> token ids, and PromptImages:
        tensors   what the model takes beside the ids
        spans     tokens that one pass has to compute together
        marks     what stands for a token where prefixes are compared: a hash of an image

Legend: T tokens of the prompt, N images, R rows of positions (4 of M-RoPE models, else 1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

GRID = "image_grid_thw"  # [N, 3]: patches of each image in time, height and width
Span = tuple[int, int]


@dataclass(slots=True, eq=False)
class PromptImages:
    """The images of one prompt. Its choices share them."""

    spans: tuple[Span, ...]  # in order; a pass computes all tokens of a span or none
    marks: Mapping[int, int]  # by token: each image has one, at its first token
    of_prompt: Mapping[str, Tensor]  # a row for each image or patch
    of_tokens: Mapping[str, Tensor]  # [1, T]
    rows: Mapping[str, tuple[int, ...]]  # where each span's rows end, by name in `of_prompt`
    num_readers: int = 1  # choices whose prompt is not computed yet
    _positions: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.nbytes for tensor in (*self.of_prompt.values(), *self.of_tokens.values()))

    def key_of(self, token_ids: Sequence[int]) -> list[int]:
        """Return token ids by which prefixes are compared: two prompts with other images differ
        from the first token of the first such image on.
        """
        key = list(token_ids)
        for at, mark in self.marks.items():
            if at < len(key):
                key[at] = mark
        return key

    def begin_of_span(self, place: int) -> int:
        """Return where the span begins that goes on both sides of a place; else the place."""
        return next((start for start, end in self.spans if start < place < end), place)

    def end_of_span(self, place: int) -> int:
        """Return where such a span ends; else the place."""
        return next((end for start, end in self.spans if start < place < end), place)

    def inputs(self, start: int, end: int) -> dict[str, Tensor]:
        """Return what the model takes for these tokens of the prompt, beside ids, mask and
        positions. No span may go on both sides of `start` or `end`.
        """
        found = {name: tensor[:, start:end] for name, tensor in self.of_tokens.items()}
        inside = [at for at, span in enumerate(self.spans) if start <= span[0] and span[1] <= end]
        if not inside:
            return found
        for name, tensor in self.of_prompt.items():
            ends = (0, *self.rows[name])
            found[name] = tensor[ends[inside[0]] : ends[inside[-1] + 1]]
        return found

    def positions_of(self, model: Any, token_ids: Sequence[int]) -> Tensor:
        """[R, 1, T] or [1, T], the positions that generate() gives the prompt's tokens."""
        if self._positions is None:
            ids = torch.tensor([token_ids], dtype=torch.long, device="cpu")
            given = {**self.of_tokens, **self.of_prompt, "attention_mask": torch.ones_like(ids)}
            self._positions = model._prepare_position_ids_for_generation(ids, given).to("cpu")
        return self._positions

    @property
    def offset(self) -> Tensor:
        """[R, 1] or [1]: how much the positions of an answer's tokens are beyond their number. An
        image may have more tokens than it has positions.
        """
        assert self._positions is not None
        return self._positions[..., -1] + 1 - self._positions.shape[-1]

    def leave(self) -> None:
        """Free the tensors when all choices have computed their prompt."""
        self.num_readers -= 1
        if self.num_readers == 0:
            self.of_prompt = self.of_tokens = {}


def images_of(
    made: Mapping[str, Any], digests: Sequence[bytes], settings: str, image_ids: Sequence[int]
) -> PromptImages:
    """The images of what a processor made of one text. `digests` are those of the pictures and
    `settings` those of the processor; `image_ids` stand for images among the ids.
    """
    ids = made["input_ids"][0]
    tensors = {name: x for name, x in made.items() if isinstance(x, Tensor) and name not in KNOWN}
    of_tokens = {name: x for name, x in tensors.items() if x.shape == made["input_ids"].shape}
    of_prompt = {name: x for name, x in tensors.items() if name not in of_tokens}
    runs = _runs([each in image_ids for each in ids.tolist()])
    hashes = [_mark_of(settings.encode(), digest) for digest in digests]
    if len(runs) != len(hashes):  # it is not known which is whose
        hashes = [_mark_of(settings.encode(), *digests)] * len(runs)
    marks = {start: mark for (start, _), mark in zip(runs, hashes, strict=True)}
    rows = _rows_by_image(of_prompt, len(runs))
    if rows is None:
        # Of such models it is not known either whether an image sees what is behind it.
        runs = [(0, runs[-1][1])] if runs else []
        rows = {name: (len(tensor),) for name, tensor in of_prompt.items()}
    return PromptImages(tuple(runs), marks, of_prompt, of_tokens, rows)


KNOWN = ("input_ids", "attention_mask")


def _mark_of(*parts: bytes) -> int:
    """A number that no token and no other image has."""
    return -int.from_bytes(hashlib.sha256(b"".join(parts)).digest(), "big") - 1


def _runs(is_image: Iterable[bool]) -> list[Span]:
    """Where tokens of images are, one beside another."""
    runs = []
    for is_run, group in groupby(enumerate(is_image), lambda each: each[1]):
        places = [at for at, _ in group]
        if is_run:
            runs.append((places[0], places[-1] + 1))
    return runs


def _rows_by_image(
    of_prompt: Mapping[str, Tensor], num_runs: int
) -> dict[str, tuple[int, ...]] | None:
    """Where the rows of each image end, by name; None where they cannot be told apart, or where the
    images are not one run of tokens each.
    """
    grid = of_prompt.get(GRID)
    if grid is None or len(grid) != num_runs:
        return None
    ends_of_patches = tuple(grid.prod(dim=-1).cumsum(0).tolist())
    ends = {num_runs: tuple(range(1, num_runs + 1)), ends_of_patches[-1]: ends_of_patches}
    if any(len(tensor) not in ends for tensor in of_prompt.values()):
        return None
    return {
        name: ends[num_runs if name == GRID else len(tensor)] for name, tensor in of_prompt.items()
    }
