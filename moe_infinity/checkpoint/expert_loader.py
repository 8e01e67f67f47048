"""Fills slots with experts, in whatever read thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.layer_recipes import LayerRecipes
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.errors import CheckpointError
from moe_infinity.experts import ExpertKey

logger = logging.getLogger(__name__)
MIN_MAPPED_BYTES = 1 << 30  # fewer are copied in less than a second


class ExpertLoader:
    """Reads experts of one checkpoint as the recipes of their MoE layers say."""

    def __init__(self, recipes: Sequence[LayerRecipes], reader: Reader, num_experts: int) -> None:
        self.recipes = list(recipes)  # by MoE layer
        self._num_experts = num_experts  # of the first
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

    def place_of(self, key: ExpertKey) -> memoryview | None:
        """Where the page cache has the expert as a slot would have it; `read` to this place makes
        it present. None if its parts lie apart or are converted. Raises CheckpointError.
        """
        extent = self.recipes[key.moe_layer_idx].extent(key.expert_idx)
        if extent is None:
            return None
        try:
            return self._reader.mapped(extent)
        except OSError as error:
            where = f"{extent.file}: cannot be read at byte {extent.offset}"
            raise CheckpointError(f"{where}: {error.strerror or error}") from error

    def can_map(self) -> bool:
        """Whether to have experts where the page cache has them: they are so many that copying them
        takes seconds, and the system can do it.
        """
        found = self._some_mappable()
        if found is None:
            return False
        first = Extent(found.file, found.offset, 1)
        try:
            self._reader.read_into(first, self._reader.mapped(first))
        except OSError as error:
            logger.info("experts are copied, as files cannot be mapped: %s", error)
            return False
        return True

    def map_apart(self) -> None:
        """Where experts are to be in the page cache: also those whose parts lie apart."""
        for recipes in self.recipes:
            recipes.lie_apart(self._num_experts)

    def _some_mappable(self) -> Extent | None:
        """A part of an expert of a layer that can be mapped, if such layers have enough bytes."""
        num_bytes = 0
        for recipes in self.recipes:
            if recipes.is_mappable(self._num_experts):
                num_bytes += self._num_experts * recipes.bytes_per_expert()
                if num_bytes >= MIN_MAPPED_BYTES:
                    return recipes.recipes[0].extents(0)[0]
        return None

    def close(self) -> None:
        """Close the files."""
        self._reader.close()
