"""Whether a conversion only concatenates is found out by trying it; one that exchanges its sources,
or the halves of its only one, does not, however alike they are in shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_infinity.checkpoint.headers import Extent, StoredTensor
from moe_infinity.checkpoint.recipe import Recipe, Source
from moe_infinity.experts import ExpertLayout

ROWS, COLUMNS = 256, 512  # a source of 256 KiB: patterns that repeat sooner would not tell


class Concatenates:
    """A conversion of transformers, as far as a recipe uses it."""

    def __init__(self, order: tuple[int, ...]) -> None:
        self.order = order  # of halves of what was collected
        self.collected_tensors: dict[str, list[torch.Tensor]] = {}

    def convert(self, name: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        found = [tensor for tensors in self.collected_tensors.values() for tensor in tensors]
        halves = torch.cat(found).chunk(2)
        return {name: torch.cat([halves[at] for at in self.order])[None]}


def recipe_of(num_sources: int, converter: Concatenates | None, *, pattern: str = "") -> Recipe:
    shape = (2 * ROWS // num_sources, COLUMNS)
    sources = tuple(
        Source(
            f"{pattern}{at}", (StoredTensor(f"{at}", "BF16", shape, Extent(Path("x"), 0, 0)),), 0
        )
        for at in range(num_sources)
    )
    layout = ExpertLayout.of({"gate_up_proj": ((2 * ROWS, COLUMNS), "bfloat16")})
    targets = {"experts.gate_up_proj": layout.params[0]}
    return Recipe("experts.gate_up_proj", sources, targets, converter, None)


@pytest.mark.parametrize("num_sources", [1, 2])
@pytest.mark.parametrize(("order", "is_plain"), [((0, 1), True), ((1, 0), False)])
def test_exchanged_halves_are_no_concatenation(num_sources, order, is_plain):
    assert recipe_of(num_sources, Concatenates(order)).try_out() is is_plain


def test_what_a_converter_may_tell_apart_is_tried_apart():
    """It sees the patterns of its sources. Where there is none, layers of all names are alike."""
    converter = Concatenates((0, 1))
    kinds = {recipe_of(1, converter, pattern=name).kind() for name in "ab"}
    assert len(kinds) == 2
    assert len({recipe_of(1, None, pattern=name).kind() for name in "ab"}) == 1
