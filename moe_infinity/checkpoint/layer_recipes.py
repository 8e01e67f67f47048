"""The experts of one MoE layer in the checkpoint: how they lie in slots, and where in files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.checkpoint.recipe import Recipe, Shapes
from moe_infinity.experts import ExpertLayout

MIN_MAPPED_SHARE = 0.9  # of the experts of a layer; others begin in one file and end in the next


class LayerRecipes:
    """All recipes of one MoE layer: together they fill a slot of `layout`. Transposed: the experts'
    class has matrices as [C, R].
    """

    def __init__(self, recipes: Sequence[Recipe], *, is_transposed: bool) -> None:
        self.recipes = tuple(recipes)
        self._is_transposed = is_transposed
        self.layout = self._arranged()

    def split(self) -> None:
        """Let slots have weights that lie apart in the checkpoint one by one. `computing` then
        hands them on as lists.
        """
        for recipe in self.recipes:
            recipe.split()
        self.layout = self._arranged()

    def _arranged(self) -> ExpertLayout:
        """Parts lie in a slot in the order they have in the file."""
        shapes: Shapes = {}
        for recipe in self.recipes:
            shapes |= recipe.slot_shapes()
        layout = self._laid_out(shapes)
        if (places := self._places(0)) is None:
            return layout
        begins = {at: (str(extent.file), extent.offset) for extent, at in places}
        specs = sorted(layout.params, key=lambda spec: begins[spec.offset])
        return self._laid_out({spec.name: shapes[spec.name] for spec in specs})

    def _laid_out(self, shapes: Shapes) -> ExpertLayout:
        """A slot that has these in that order, which the recipes are told."""
        return self._told(ExpertLayout.of(shapes))

    def _told(self, layout: ExpertLayout) -> ExpertLayout:
        specs = {spec.name: spec for spec in layout.params}
        for recipe in self.recipes:
            recipe.place(specs, is_transposed=self._is_transposed)
        return layout

    def _places(self, expert_idx: int) -> list[tuple[Extent, int]] | None:
        """Which bytes of files go where in a slot; None if some are converted on the way."""
        found = [recipe.places(expert_idx) for recipe in self.recipes]
        if None in found:
            return None
        return [place for places in found for place in places or ()]

    def extent(self, expert_idx: int) -> Extent | None:
        """The bytes of a file that are those of a slot with this expert. None if there are not."""
        places = self._places(expert_idx)
        if places is None:
            return None
        begins = {(extent.file, extent.offset - at) for extent, at in places}
        if len(begins) > 1:
            return None
        ((file, first),) = begins
        return Extent(file, first, max(at + extent.num_bytes for extent, at in places))

    def is_mappable(self, num_experts: int) -> bool:
        """Whether nearly all experts lie in a file as in a slot, at least after `lie_apart`."""
        whole = sum(self.extent(expert_idx) is not None for expert_idx in range(num_experts))
        return whole >= MIN_MAPPED_SHARE * num_experts or self._apart(num_experts) is not None

    def lie_apart(self, num_experts: int) -> None:
        """Let the parts of an expert lie in a slot as far from each other as they do in its file,
        if that is as far for all experts: those of GGUF files, where parts of one size are in
        tensors of all experts. Such a slot is a stretch of the file, most of which belongs to
        others.
        """
        if self.extent(0) is None and (offsets := self._apart(num_experts)) is not None:
            specs = {spec.name: spec for spec in self.layout.params}
            moved = [replace(specs[name], offset=at) for name, at in offsets.items()]
            moved.sort(key=lambda spec: spec.offset)
            self.layout = self._told(ExpertLayout(tuple(moved)))

    def _apart(self, num_experts: int) -> dict[str, int] | None:
        """By part, how far it is from the first one in the file. None if that differs."""
        names = [spec.name for recipe in self.recipes for spec in recipe.stored]
        if self._places(0) is None:
            return None
        found: set[tuple[int, ...]] = set()
        for expert_idx in range(num_experts):
            extents = [each for recipe in self.recipes for each in recipe.extents(expert_idx)]
            # A parameter that is neither packed nor split has to be in one piece.
            if len(extents) != len(names) or len({extent.file for extent in extents}) > 1:
                return None
            first = min(extent.offset for extent in extents)
            found.add(tuple(extent.offset - first for extent in extents))
            if len(found) > 1:
                return None
        (offsets,) = found
        return dict(zip(names, offsets, strict=True))

    @property
    def is_byte_copy(self) -> bool:
        """Whether loads put nothing but stored bytes into slots."""
        return all(recipe.is_packed or recipe.only_concatenates for recipe in self.recipes)

    @property
    def is_packed(self) -> bool:
        return any(recipe.is_packed for recipe in self.recipes)

    def bytes_per_expert(self) -> int:
        """Bytes read from disk for one expert."""
        return sum(extent.num_bytes for recipe in self.recipes for extent in recipe.extents(0))

    def load(self, expert_idx: int, reader: Reader, slot: memoryview) -> None:
        """Fill a slot with one expert. What needs no conversion goes to the reader in one call,
        which reads neighbours in the file, as these mostly are, as one. The rest is converted,
        recipe by recipe. Raises CheckpointError.
        """
        pieces = [recipe.pieces(expert_idx, slot) for recipe in self.recipes]
        reader.read([piece for found in pieces if found is not None for piece in found])
        for recipe, found in zip(self.recipes, pieces, strict=True):
            if found is None:
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
