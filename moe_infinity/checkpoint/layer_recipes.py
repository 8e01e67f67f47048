"""The experts of a checkpoint: how those of one MoE layer lie in slots and in files, and the loader
that fills slots with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.recipe import Recipe, Shapes
from moe_infinity.errors import CheckpointError
from moe_infinity.experts import ExpertKey, ExpertLayout

MIN_MAPPED_BYTES = 1 << 30  # fewer are copied in less than a second
MIN_MAPPED_SHARE = 0.9  # of the experts of a layer; others begin in one file and end in the next

logger = logging.getLogger(__name__)


class LayerRecipes:
    """All recipes of one MoE layer: together they fill a slot of `layout`. Transposed: the experts'
    class has matrices as [C, R].
    """

    def __init__(self, recipes: Sequence[Recipe], *, is_transposed: bool) -> None:
        self.recipes = tuple(recipes)
        self._is_transposed = is_transposed
        self.layout = self._arranged()

    def split(self) -> None:
        """Let slots hold weights that lie apart in the checkpoint one by one. `computing` then
        passes them on as lists.
        """
        for recipe in self.recipes:
            recipe.split()
        self.layout = self._arranged()

    def _arranged(self) -> ExpertLayout:
        """A layout whose parts lie in a slot in the order they have in the file."""
        shapes: Shapes = {}
        for recipe in self.recipes:
            shapes |= recipe.slot_shapes()
        layout = self._laid_out(shapes)
        if (copies := self._copies(0)) is None:
            return layout
        begins = {at: (str(extent.file), extent.offset) for extent, at in copies}
        specs = sorted(layout.params, key=lambda spec: begins[spec.offset])
        return self._laid_out({spec.name: shapes[spec.name] for spec in specs})

    def _laid_out(self, shapes: Shapes) -> ExpertLayout:
        return self._applied(ExpertLayout.of(shapes))

    def _applied(self, layout: ExpertLayout) -> ExpertLayout:
        """The layout, by which all recipes fill slots from now on."""
        specs = {spec.name: spec for spec in layout.params}
        for recipe in self.recipes:
            recipe.lay_out(specs, is_transposed=self._is_transposed)
        return layout

    def _copies(self, expert_idx: int) -> list[tuple[Extent, int]] | None:
        """Bytes of files, and where in a slot they go; None if some are converted on the way."""
        by_recipe = [recipe.copies(expert_idx) for recipe in self.recipes]
        if None in by_recipe:
            return None
        return [copy for copies in by_recipe for copy in copies or ()]

    def extent(self, expert_idx: int) -> Extent | None:
        """The bytes of a file that equal those of a slot with this expert; None if none do."""
        copies = self._copies(expert_idx)
        if copies is None:
            return None
        begins = {(extent.file, extent.offset - at) for extent, at in copies}
        if len(begins) > 1:
            return None
        ((file, first),) = begins
        return Extent(file, first, max(at + extent.num_bytes for extent, at in copies))

    def is_mappable(self, num_experts: int) -> bool:
        """True if nearly all experts lie in a file as in a slot, at least after `lie_apart`."""
        whole = sum(self.extent(expert_idx) is not None for expert_idx in range(num_experts))
        return whole >= MIN_MAPPED_SHARE * num_experts or self._apart(num_experts) is not None

    def lie_apart(self, num_experts: int) -> None:
        """Keep the gaps that the parts of an expert have in its file in the slot, too, if they are
        the same for all experts. In GGUF files they are, because each tensor holds one part of all
        experts. Such a slot is a stretch of the file, most of which belongs to other experts.
        """
        if self.extent(0) is None and (offsets := self._apart(num_experts)) is not None:
            specs = {spec.name: spec for spec in self.layout.params}
            moved = [replace(specs[name], offset=at) for name, at in offsets.items()]
            moved.sort(key=lambda spec: spec.offset)
            self.layout = self._applied(ExpertLayout(tuple(moved)))

    def _apart(self, num_experts: int) -> dict[str, int] | None:
        """The distance of each part from the first one in the file, by its name. None if experts
        differ in it.
        """
        names = [spec.name for recipe in self.recipes for spec in recipe.stored]
        if self._copies(0) is None:
            return None
        distances: set[tuple[int, ...]] = set()
        for expert_idx in range(num_experts):
            extents = [each for recipe in self.recipes for each in recipe.extents(expert_idx)]
            # A parameter that is neither packed nor split has to be in one piece.
            if len(extents) != len(names) or len({extent.file for extent in extents}) > 1:
                return None
            first = min(extent.offset for extent in extents)
            distances.add(tuple(extent.offset - first for extent in extents))
            if len(distances) > 1:
                return None
        (offsets,) = distances
        return dict(zip(names, offsets, strict=True))

    @property
    def is_byte_copy(self) -> bool:
        """True if loads put nothing but stored bytes into slots."""
        return all(recipe.is_packed or recipe.only_concatenates for recipe in self.recipes)

    @property
    def is_packed(self) -> bool:
        return any(recipe.is_packed for recipe in self.recipes)

    def bytes_per_expert(self) -> int:
        """Bytes read from disk for one expert."""
        return sum(extent.num_bytes for recipe in self.recipes for extent in recipe.extents(0))

    def load(self, expert_idx: int, reader: Reader, slot: memoryview) -> None:
        """Fill a slot with one expert. Everything that needs no conversion goes to the reader in
        one call, which reads neighbours in the file, as these mostly are, as one. The rest is
        converted, recipe by recipe. Raises CheckpointError.
        """
        by_recipe = [recipe.pieces(expert_idx, slot) for recipe in self.recipes]
        reader.read([piece for pieces in by_recipe if pieces is not None for piece in pieces])
        for recipe, pieces in zip(self.recipes, by_recipe, strict=True):
            if pieces is None:
                recipe.load(expert_idx, reader, slot)

    def computing(self, compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`compute`, which takes parameters, as a function of the views of a slot: packed
        parameters are unpacked each time.
        """
        if not any(recipe.is_in_parts for recipe in self.recipes):
            return compute

        def compute_from_parts(slot: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
            params: dict[str, Any] = {}
            for recipe in self.recipes:
                params |= recipe.params(slot)
            return compute(params, *args, **kwargs)

        return compute_from_parts


class ExpertLoader:
    """Fills slots with the experts of one checkpoint, in any read thread."""

    def __init__(self, recipes: Sequence[LayerRecipes], reader: Reader, num_experts: int) -> None:
        self.recipes = list(recipes)  # by MoE layer
        self._num_experts = num_experts  # of the first
        self._reader = reader
        self._positions: dict[ExpertKey, tuple[int, str, int]] = {}  # of those asked for so far

    def read(self, key: ExpertKey, slot: memoryview) -> None:
        """Read an expert that a layer waits for. Raises CheckpointError."""
        self.recipes[key.moe_layer_idx].load(key.expert_idx, self._reader, slot)

    def read_ahead(self, key: ExpertKey, slot: memoryview, is_wanted: Callable[[], bool]) -> None:
        """Read an expert that no layer waits for. The read gives way to those that one waits for,
        until `is_wanted` says that this one is waited for, too.
        """
        with self._reader.giving_way(until=is_wanted):
            self.read(key, slot)

    def in_file_order(self, keys: Iterable[ExpertKey]) -> list[ExpertKey]:
        """The keys layer by layer, in the order of their files: names are stored "1", "10", "2"."""
        return sorted(keys, key=self._position_of)

    def _position_of(self, key: ExpertKey) -> tuple[int, str, int]:
        if key not in self._positions:
            first = self.recipes[key.moe_layer_idx].recipes[0].extents(key.expert_idx)[0]
            self._positions[key] = key.moe_layer_idx, str(first.file), first.offset
        return self._positions[key]

    def mapped_bytes(self, key: ExpertKey) -> memoryview | None:
        """The bytes of a slot with this expert as the page cache has them; `read` into them makes
        them present. None if its parts lie apart or are converted. Raises CheckpointError.
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
        """True if experts are better used where the page cache has them: copying all of them would
        take seconds, and the system can map files.
        """
        extent = self._some_mappable()
        if extent is None:
            return False
        first = Extent(extent.file, extent.offset, 1)
        try:
            self._reader.read_into(first, self._reader.mapped(first))
        except OSError as error:
            logger.info("experts are copied, as files cannot be mapped: %s", error)
            return False
        return True

    def changed_file(self) -> Path | None:
        """Return a file that was changed whose experts are used in the page cache, or None."""
        return self._reader.changed_file()

    def map_apart(self) -> None:
        """Use experts in the page cache even where their parts lie apart."""
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
