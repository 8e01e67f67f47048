"""Fills slots with experts, in whatever read thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.recipe import LayerRecipes
from moe_infinity.experts import ExpertKey


class ExpertLoader:
    """Reads experts of one checkpoint as the recipes of their MoE layers say."""

    def __init__(self, recipes: Sequence[LayerRecipes], reader: Reader) -> None:
        self.recipes = list(recipes)  # by MoE layer
        self._reader = reader
        self._places: dict[ExpertKey, tuple[int, str, int]] = {}  # as far as they were asked for

    def read(self, key: ExpertKey, slot: memoryview) -> None:
        """A layer waits for this one. Raises CheckpointError."""
        self.recipes[key.moe_layer_idx].load(key.expert_idx, self._reader, slot)

    def read_ahead(self, key: ExpertKey, slot: memoryview, is_wanted: Callable[[], bool]) -> None:
        """No layer waits for this one: it gives way to those that one waits for, until `is_wanted`
        says that one does.
        """
        with self._reader.giving_way(until=is_wanted):
            self.read(key, slot)

    def in_file_order(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """Layer by layer, and as they lie in the files: names are stored "1", "10", "11", "2"."""
        return sorted(keys, key=self._place_of)

    def _place_of(self, key: ExpertKey) -> tuple[int, str, int]:
        if key not in self._places:
            first = self.recipes[key.moe_layer_idx].recipes[0].extents(key.expert_idx)[0]
            self._places[key] = key.moe_layer_idx, str(first.file), first.offset
        return self._places[key]

    def close(self) -> None:
        """Close the files."""
        self._reader.close()
