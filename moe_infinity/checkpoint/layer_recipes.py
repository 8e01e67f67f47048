"""The experts of a checkpoint: how those of one MoE layer lie in slots and in files, and the loader
that fills slots with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_infinity.checkpoint.files import Copy, Piece, cut
from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.recipe import Recipe, Shapes
from moe_infinity.errors import CheckpointError
from moe_infinity.experts import ExpertKey, ExpertLayout, MappedExpert
from moe_infinity.system.memory import address_of

if TYPE_CHECKING:
    from moe_infinity.checkpoint.shared_reads import SharedRead

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
        if (copies := self.copies(0)) is None:
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

    def copies(self, expert_idx: int) -> list[Copy] | None:
        """Bytes of files, and where in a slot they go; None if some are converted on the way."""
        by_recipe = [recipe.copies(expert_idx) for recipe in self.recipes]
        if None in by_recipe:
            return None
        return [copy for copies in by_recipe for copy in copies or ()]

    def begins(self, expert_idx: int) -> list[tuple[Path, int]] | None:
        """The file and the byte from which a slot with this expert would reach, for its first
        product and for `down_proj`. None if the file does not have its parts as a slot does.
        """
        begins: list[set[tuple[Path, int]]] = [set(), set()]
        for recipe in self.recipes:
            if (copies := recipe.copies(expert_idx)) is None:
                return None
            begins[recipe.is_of_down].update((e.file, e.offset - at) for e, at in copies)
        begins[1] = begins[1] or begins[0]
        if any(len(found) != 1 for found in begins):
            return None
        return [begin for (begin,) in begins]

    def num_mappable(self, num_experts: int) -> int:
        """How many experts lie in a file as in a slot, at least after `lie_apart`. 0 unless nearly
        all do.
        """
        if self._apart(num_experts) is not None:
            return num_experts
        whole = sum(self.begins(expert_idx) is not None for expert_idx in range(num_experts))
        return whole if whole >= MIN_MAPPED_SHARE * num_experts else 0

    def bytes_in_place(self, num_experts: int, slot_bytes: int) -> int:
        """Bytes of memory that so many experts take where those that can be are mapped, and others
        have a slot each.
        """
        num_mapped = self.num_mappable(num_experts)
        return num_mapped * self.bytes_per_expert() + (num_experts - num_mapped) * slot_bytes

    def lie_apart(self, num_experts: int) -> None:
        """Keep the gaps that the parts of a product have in the file in the slot, too, if they are
        the same for all experts. In GGUF files they are, because each tensor holds one part of all
        experts, and gate and up have one type. Such a slot is a stretch of the file, most of which
        belongs to other experts.
        """
        if self.begins(0) is None and (offsets := self._apart(num_experts)) is not None:
            specs = {spec.name: spec for spec in self.layout.params}
            moved = [replace(specs[name], offset=at) for name, at in offsets.items()]
            moved.sort(key=lambda spec: spec.offset)
            self.layout = self._applied(ExpertLayout(tuple(moved)))

    def _apart(self, num_experts: int) -> dict[str, int] | None:
        """The distance of each part from the first one of its product in the file, by its name.
        None if experts differ in it.
        """
        if self.copies(0) is None:
            return None
        offsets: dict[str, int] = {}
        for is_of_down in (False, True):
            recipes = [recipe for recipe in self.recipes if recipe.is_of_down == is_of_down]
            names = [spec.name for recipe in recipes for spec in recipe.stored]
            if (found := _distances(recipes, num_experts, len(names))) is None:
                return None
            offsets |= zip(names, found, strict=True)
        return offsets

    def mapped(
        self, expert_idx: int, mapped: Callable[[Extent], memoryview]
    ) -> MappedExpert | None:
        """An expert where `mapped` has the bytes of its files; None if its parts do not lie there
        as in a slot, or if they are converted.
        """
        if (begins := self.begins(expert_idx)) is None:
            return None
        parts: dict[str, memoryview] = {}
        addresses = [0, 0]
        for recipe in self.recipes:
            file, begin = begins[recipe.is_of_down]
            for spec in recipe.stored:
                part = mapped(Extent(file, begin + spec.offset, spec.num_bytes))
                addresses[recipe.is_of_down] = address_of(part) - spec.offset
                parts[spec.name] = part
        return MappedExpert(parts, addresses[0], addresses[1] or addresses[0])

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

    def read_mapped(self, expert_idx: int, reader: Reader, expert: MappedExpert) -> None:
        """Make the bytes of a mapped expert present. Raises CheckpointError."""
        pieces: list[Piece] = []
        for recipe in self.recipes:
            for i, (extent, at) in enumerate(recipe.copies(expert_idx) or ()):
                spec = recipe.stored[i % len(recipe.stored)]  # one, if all are parts of it
                first = at - spec.offset
                pieces.append((extent, expert.parts[spec.name][first : first + extent.num_bytes]))
        reader.read(pieces)

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


def _distances(
    recipes: Sequence[Recipe], num_experts: int, num_parts: int
) -> tuple[int, ...] | None:
    """The bytes from the first part of a product in its file to each of so many. None if experts
    differ, or if a part is not in one piece.
    """
    found: tuple[int, ...] | None = None
    for expert_idx in range(num_experts):
        extents = [extent for recipe in recipes for extent in recipe.extents(expert_idx)]
        if len(extents) != num_parts or len({extent.file for extent in extents}) > 1:
            return None
        first = min((extent.offset for extent in extents), default=0)
        distances = tuple(extent.offset - first for extent in extents)
        if found not in (None, distances):
            return None
        found = distances
    return found


class ExpertLoader:
    """Fills slots with the experts of one checkpoint, in any read thread."""

    def __init__(self, recipes: Sequence[LayerRecipes], reader: Reader, num_experts: int) -> None:
        self.recipes = list(recipes)  # by MoE layer
        self._num_experts = num_experts  # of the first
        self._reader = reader
        self._positions: dict[ExpertKey, tuple[int, str, int]] = {}  # of those asked for so far
        self._chunks: dict[ExpertKey, Sequence[Copy] | None] = {}  # of those shared so far

    def read(self, key: ExpertKey, slot: memoryview | MappedExpert) -> None:
        """Read an expert that a layer waits for. Raises CheckpointError."""
        recipes = self.recipes[key.moe_layer_idx]
        if isinstance(slot, MappedExpert):
            recipes.read_mapped(key.expert_idx, self._reader, slot)
        else:
            recipes.load(key.expert_idx, self._reader, slot)

    def read_ahead(
        self, key: ExpertKey, slot: memoryview | MappedExpert, is_wanted: Callable[[], bool]
    ) -> None:
        """Read an expert that no layer waits for. The read gives way to those that one waits for,
        until `is_wanted` says that this one is waited for, too.
        """
        with self._reader.giving_way(until=is_wanted):
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
        return self._reader.shared(experts)

    def _chunks_of(self, key: ExpertKey) -> Sequence[Copy] | None:
        """The chunks to read of an expert; None if it is converted on the way."""
        if key not in self._chunks:
            copies = self.recipes[key.moe_layer_idx].copies(key.expert_idx)
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
            return recipes.mapped(key.expert_idx, self._reader.mapped)
        except OSError as error:
            extent = recipes.recipes[0].extents(key.expert_idx)[0]
            where = f"{extent.file}: cannot be read at byte {extent.offset}"
            raise CheckpointError(f"{where}: {error.strerror or error}") from error

    def is_present(self, key: ExpertKey) -> bool:
        """True for an expert that `mapped` gives, and that the page cache has already."""
        recipes = self.recipes[key.moe_layer_idx]
        try:
            return recipes.begins(key.expert_idx) is not None and all(
                self._reader.is_cached(extent)
                for recipe in recipes.recipes
                for extent in recipe.extents(key.expert_idx)
            )
        except (OSError, CheckpointError):  # `read` says what is wrong
            return False

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
            if recipes.num_mappable(self._num_experts):
                num_bytes += self._num_experts * recipes.bytes_per_expert()
                if num_bytes >= MIN_MAPPED_BYTES:
                    return recipes.recipes[0].extents(0)[0]
        return None

    def close(self) -> None:
        """Close the files."""
        self._reader.close()
