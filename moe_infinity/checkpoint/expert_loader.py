"""Fills slots with the experts of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from moe_infinity.checkpoint.files import Copy, cut
from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.layer_recipes import LayerRecipes
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.errors import CheckpointError
from moe_infinity.experts import ExpertKey, MappedExpert

if TYPE_CHECKING:
    from moe_infinity.checkpoint.shared_reads import SharedRead

MIN_MAPPED_BYTES = 1 << 30  # fewer are copied in less than a second


class ExpertLoader:
    """Fills slots with the experts of one checkpoint, in any read thread."""

    def __init__(
        self, recipes: Sequence[LayerRecipes], reader: Reader, num_experts: Sequence[int]
    ) -> None:
        self.recipes = list(recipes)  # by MoE layer
        self._num_experts = list(num_experts)
        self.reader = reader
        self._positions: dict[ExpertKey, tuple[int, str, int]] = {}  # of those asked for so far
        self._chunks: dict[ExpertKey, Sequence[Copy] | None] = {}  # of those shared so far

    def read(self, key: ExpertKey, slot: memoryview | MappedExpert) -> None:
        """Read an expert that a layer waits for. Raises CheckpointError."""
        recipes = self.recipes[key.moe_layer_idx]
        if isinstance(slot, memoryview):
            recipes.load(key.expert_idx, self.reader, slot)
        else:
            recipes.read_mapped(key.expert_idx, self.reader, slot)

    def read_ahead(
        self, key: ExpertKey, slot: memoryview | MappedExpert, is_wanted: Callable[[], bool]
    ) -> None:
        """Read an expert that no layer waits for. The read gives way to those that one waits for,
        until `is_wanted` says that this one is waited for, too.
        """
        with self.reader.giving_way(until=is_wanted):
            self.read(key, slot)

    def shared(
        self, loads: Sequence[tuple[ExpertKey, Callable[[], memoryview]]]
    ) -> SharedRead | None:
        """Reads of several experts that threads do together; None if each has to be read by `read`,
        as those have that are converted.
        """
        experts = []
        for key, slot in loads:
            if (chunks := self._chunks_of(key)) is None:
                return None
            experts.append((chunks, slot))
        return self.reader.shared(experts)

    def _chunks_of(self, key: ExpertKey) -> Sequence[Copy] | None:
        """The chunks to read of an expert; None if it is converted on the way."""
        if key not in self._chunks:
            copies = self.recipes[key.moe_layer_idx].reads(key.expert_idx)
            self._chunks[key] = None if copies is None else cut(copies)
        return self._chunks[key]

    def in_file_order(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """The keys layer by layer, in the order of their files: names are stored "1", "10", "2"."""
        return sorted(keys, key=self._position_of)

    def _position_of(self, key: ExpertKey) -> tuple[int, str, int]:
        if key not in self._positions:
            first = self.recipes[key.moe_layer_idx].recipes[0].extents(key.expert_idx)[0]
            self._positions[key] = key.moe_layer_idx, str(first.file), first.offset
        return self._positions[key]

    def mapped(self, key: ExpertKey) -> MappedExpert | None:
        """An expert where the page cache has its bytes; `read` makes them present. None if its
        parts are converted or lie otherwise than in a slot. Raises CheckpointError.
        """
        recipes = self.recipes[key.moe_layer_idx]
        try:
            return recipes.mapped(key.expert_idx, self.reader.mapped)
        except OSError as error:
            extent = recipes.recipes[0].extents(key.expert_idx)[0]
            where = f"{extent.file}: cannot be read at byte {extent.offset}"
            raise CheckpointError(f"{where}: {error.strerror or error}") from error

    def present(self, keys: Sequence[ExpertKey]) -> Iterator[ExpertKey]:
        """Yield those of some experts of one layer that `mapped` gives, and that the page cache has
        already.
        """
        recipes = self.recipes[keys[0].moe_layer_idx]
        has_all = recipes.is_stacked and self._are_cached(recipes.stored())
        for key in keys:
            own = (extent for each in recipes.recipes for extent in each.extents(key.expert_idx))
            is_cached = has_all or self._are_cached(own)
            if is_cached and recipes.stretches(key.expert_idx) is not None:
                yield key

    def _are_cached(self, extents: Iterable[Extent]) -> bool:
        try:
            return all(map(self.reader.is_cached, extents))
        except (OSError, CheckpointError):  # `read` says what is wrong
            return False

    def can_map(self) -> bool:
        """True if experts are better used where the page cache has them: copying all of them would
        take seconds, and the system can map files.
        """
        extent = self._some_mappable()
        return extent is not None and self.reader.can_map(extent)

    def lie_in_blocks(self) -> None:
        """Let experts lie in slots so that reads past the page cache need no copy."""
        for recipes, num_experts in zip(self.recipes, self._num_experts, strict=True):
            recipes.lie_in_blocks(num_experts)

    def _some_mappable(self) -> Extent | None:
        """A part of an expert of a layer that can be mapped, if such layers have enough bytes."""
        num_bytes = 0
        for recipes, num_experts in zip(self.recipes, self._num_experts, strict=True):
            if recipes.num_mappable(num_experts):
                num_bytes += num_experts * recipes.bytes_per_expert()
                if num_bytes >= MIN_MAPPED_BYTES:
                    return recipes.recipes[0].extents(0)[0]
        return None

    def close(self) -> None:
        """Close the files."""
        self.reader.close()
