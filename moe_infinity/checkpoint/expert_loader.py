"""Fills slots with experts, in whatever read thread."""

from __future__ import annotations

from collections.abc import Sequence

from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.recipe import LayerRecipes
from moe_infinity.experts import ExpertKey


class ExpertLoader:
    """Reads experts of one checkpoint as the recipes of their MoE layers say."""

    def __init__(self, recipes: Sequence[LayerRecipes], reader: Reader) -> None:
        self.recipes = list(recipes)  # by MoE layer
        self._reader = reader

    def read(self, key: ExpertKey, slot: memoryview) -> None:
        """A layer waits for this one. Raises CheckpointError."""
        self.recipes[key.moe_layer_idx].load(key.expert_idx, self._reader, slot)

    def read_ahead(self, key: ExpertKey, slot: memoryview) -> None:
        """No layer waits for this one: it gives way to those that one waits for."""
        with self._reader.giving_way():
            self.read(key, slot)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()
