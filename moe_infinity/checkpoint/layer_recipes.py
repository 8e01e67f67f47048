"""How the experts of one MoE layer lie in slots and in files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_infinity.checkpoint.files import BLOCK_BYTES, Copy, in_whole_blocks
from moe_infinity.checkpoint.headers import Extent, are_neighbours
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.recipe import Recipe, Shapes
from moe_infinity.experts import ExpertLayout, MappedExpert, ParamSpec

MIN_MAPPED_SHARE = 0.9  # of the experts of a layer; others begin in one file and end in the next
MOST_WITH_GAPS = 1.03  # times as large may a slot become so that its parts lie in blocks
WORD_BYTES = 8  # what views of parts may begin at, whatever their dtype


class LayerRecipes:
    """All recipes of one MoE layer: together they fill a slot of `layout`. Transposed: the experts'
    class has matrices as [C, R].
    """

    def __init__(self, recipes: Sequence[Recipe], *, is_transposed: bool) -> None:
        self.recipes = tuple(recipes)
        self._is_transposed = is_transposed
        self.layout = self._arranged()
        self._ends: dict[Path, int] = {}  # of experts in files, if parts lie in blocks as there
        self._stretches: dict[int, dict[str, Extent] | None] = {}  # of experts asked for so far

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

    def slot_bytes(self, num_experts: int, *, in_blocks: bool) -> int:
        """The bytes of a slot, at least after `lie_in_blocks` if that is to be called."""
        plain = self.layout.slot_bytes
        if not in_blocks or self.copies(0) is None:
            return plain
        few = min(num_experts, 2)  # they tell of nearly all layers that nothing changes
        whole = _in_whole_blocks(self._in_blocks(few) or self.layout)  # the next slot, too
        return whole if whole <= self._most_bytes else plain

    def lie_in_blocks(self, num_experts: int) -> None:
        """Let each part begin in a block of the slot where it begins in a block of its file, and
        have its blocks alone, unless parts are neighbours in the file. Nothing changes where
        experts differ in that, or where the gaps would take much memory.
        """
        if (layout := self._in_blocks(num_experts)) is not None:
            self.layout = self._applied(layout)
            for extent in (e for i in range(num_experts) for e, _ in self.copies(i) or ()):
                self._ends[extent.file] = max(self._ends.get(extent.file, 0), extent.end)

    def _in_blocks(self, num_experts: int) -> ExpertLayout | None:
        """The layout after `lie_in_blocks`; None if nothing changes."""
        places = self._places(0)
        if places is None or any(self._places(i) != places for i in range(1, num_experts)):
            return None
        specs = {spec.offset: spec for spec in self.layout.params}
        moved: list[ParamSpec] = []
        for at, follows, in_block in places:
            if at in specs:
                end = moved[-1].offset + moved[-1].num_bytes if moved else 0
                begin = end if follows else end + -end % BLOCK_BYTES + in_block
                moved.append(replace(specs[at], offset=begin))
            if begin % WORD_BYTES or not (at in specs or follows):
                return None  # no view of it can be made, or it is a part whose halves lie apart
        layout = ExpertLayout(tuple(moved))
        return layout if _in_whole_blocks(layout) <= self._most_bytes else None

    @property
    def _most_bytes(self) -> float:
        """The bytes that a slot may take so that its parts lie in blocks."""
        return self.layout.slot_bytes * MOST_WITH_GAPS

    def _places(self, expert_idx: int) -> list[tuple[int, bool, int]] | None:
        """Where in a slot each copy goes, whether its bytes follow those of the one before in the
        file, and where in a block of the file they begin. None if bytes are converted.
        """
        places = []
        end = None
        if (copies := self.copies(expert_idx)) is None:
            return None
        for extent, at in sorted(copies, key=lambda copy: copy[1]):
            places.append((at, end == (extent.file, extent.offset), extent.offset % BLOCK_BYTES))
            end = extent.file, extent.end
        return places

    def reads(self, expert_idx: int) -> list[Copy] | None:
        """The copies, with the rest of their blocks if a slot has room for it."""
        copies = self.copies(expert_idx)
        return in_whole_blocks(copies, self._ends) if copies and self._ends else copies

    def stretches(self, expert_idx: int) -> dict[str, Extent] | None:
        """The stretch of a file that each part of a slot is, by its name. None if some are several
        stretches, or are converted.
        """
        if expert_idx not in self._stretches:
            is_like_first = expert_idx > 0 and self.is_stacked
            found = self.stretches(0) if is_like_first else self._find_stretches(expert_idx)
            if is_like_first and found is not None:  # quickly: there may be 10,000
                found = {name: first.after(expert_idx) for name, first in found.items()}
            self._stretches[expert_idx] = found
        return self._stretches[expert_idx]

    @property
    def is_stacked(self) -> bool:
        """True if each stored weight has all experts, one after the other."""
        return all(source.num_parts for recipe in self.recipes for source in recipe.sources)

    def stored(self) -> Iterator[Extent]:
        """Yield the bytes of all experts in files."""
        for source in (source for recipe in self.recipes for source in recipe.sources):
            for weight in source.weights:
                yield from (part.extent for _, part in weight.parts)

    def _find_stretches(self, expert_idx: int) -> dict[str, Extent] | None:
        found: dict[str, Extent] = {}
        for recipe in self.recipes:
            if (copies := recipe.copies(expert_idx)) is None:
                return None
            extents = [extent for extent, _ in copies]
            by_part = [[extent] for extent in extents] if recipe.is_in_parts else [extents]
            for spec, own in zip(recipe.stored, by_part, strict=True):
                if not are_neighbours(own):
                    return None
                found[spec.name] = Extent(own[0].file, own[0].offset, spec.num_bytes)
        return found

    def num_mappable(self, num_experts: int) -> int:
        """How many experts lie in files so that they can be used there. 0 unless nearly all do."""
        if self.is_stacked:
            return num_experts if self.stretches(0) is not None else 0
        whole = sum(self.stretches(expert_idx) is not None for expert_idx in range(num_experts))
        return whole if whole >= MIN_MAPPED_SHARE * num_experts else 0

    def bytes_in_place(self, num_experts: int, slot_bytes: int) -> int:
        """Bytes of memory that so many experts take where those that can be are mapped, and others
        have a slot each.
        """
        num_mapped = self.num_mappable(num_experts)
        return num_mapped * self.bytes_per_expert() + (num_experts - num_mapped) * slot_bytes

    def mapped(
        self, expert_idx: int, mapped: Callable[[Extent], memoryview]
    ) -> MappedExpert | None:
        """An expert where `mapped` has the bytes of its files; None if it does not lie there."""
        if (stretches := self.stretches(expert_idx)) is None:
            return None
        return {name: mapped(stretch) for name, stretch in stretches.items()}

    @property
    def is_byte_copy(self) -> bool:
        """True if loads put nothing but stored bytes into slots."""
        return all(recipe.is_in_parts or recipe.only_concatenates for recipe in self.recipes)

    @property
    def is_packed(self) -> bool:
        return any(recipe.is_packed for recipe in self.recipes)

    def bytes_per_expert(self) -> int:
        """Bytes read from disk for one expert."""
        return sum(extent.num_bytes for recipe in self.recipes for extent in recipe.extents(0))

    def read_mapped(self, expert_idx: int, reader: Reader, expert: MappedExpert) -> None:
        """Make the bytes of a mapped expert present. Raises CheckpointError."""
        stretches = self.stretches(expert_idx) or {}
        reader.read([(stretch, expert[name]) for name, stretch in stretches.items()])

    def load(self, expert_idx: int, reader: Reader, slot: memoryview) -> None:
        """Fill a slot with one expert. Everything that needs no conversion goes to the reader in
        one call, which reads neighbours in the file, as these mostly are, as one. The rest is
        converted, recipe by recipe. Raises CheckpointError.
        """
        by_recipe = [recipe.copies(expert_idx) for recipe in self.recipes]
        reads = [copy for copies in by_recipe for copy in copies or ()]
        if self._ends:
            reads = in_whole_blocks(reads, self._ends)
        reader.read([(extent, slot[at : at + extent.num_bytes]) for extent, at in reads])
        for recipe, copies in zip(self.recipes, by_recipe, strict=True):
            if copies is None:
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


def _in_whole_blocks(layout: ExpertLayout) -> int:
    """The bytes of a slot with room for the rest of the last block."""
    return layout.slot_bytes + -layout.slot_bytes % BLOCK_BYTES
