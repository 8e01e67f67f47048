"""Experts that lie in blocks of a slot as in blocks of their file: the same bytes and logits, and
reads past the page cache need no copy."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.checkpoint import files, layer_recipes
from moe_infinity.checkpoint.files import BLOCK_BYTES, Copy, cut, in_whole_blocks
from moe_infinity.checkpoint.headers import Extent
from moe_infinity.checkpoint.layer_recipes import LayerRecipes
from moe_infinity.experts import ExpertKey, ParamSpec
from moe_infinity.system import linux
from tests.closeness import logits_of_steps
from tests.gguf_files import build
from tests.gguf_models import WIDE
from tests.on_demand import ON_DEMAND
from tools.convert_to_gguf import convert

pytestmark = [
    pytest.mark.usefixtures("without_samples"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux reads past the page cache"),
]
IDS = torch.arange(3, 15).view(1, 12)
ALWAYS = 100.0  # times as large may a slot become
NEVER = 1.0


@pytest.fixture(autouse=True)
def all_files_are_large(monkeypatch):
    monkeypatch.setattr(files, "SMALL_FILE_BYTES", 0)
    monkeypatch.setattr(linux, "is_cached", lambda *where: False)


@pytest.fixture(scope="module", params=["safetensors", "w1, w2, w3", "q8_0", "bf16"])
def model(request, tmp_path_factory) -> Path:
    """With experts of whole blocks: in a folder each is in one piece, or in three that are named
    so, of which the second is down; in a GGUF file in three.
    """
    name = "mixtral" if request.param == "w1, w2, w3" else "qwen3_moe"
    folder = build(name, tmp_path_factory.mktemp("blocks") / "model", **WIDE)
    if request.param in ("safetensors", "w1, w2, w3"):
        return folder
    file = folder.with_suffix(".gguf")
    convert(folder, file, request.param)
    return file


def slot_of(moe: MoE, key: ExpertKey) -> bytearray:
    """What a slot holds with this expert, in memory that was filled with something else."""
    slot = bytearray(b"\xaa" * moe.engine.tiers[0].slots.slot_bytes)
    moe.engine.loader.read(key, memoryview(slot))
    return slot


def bytes_of(extent: Extent) -> bytes:
    with extent.file.open("rb") as file:
        file.seek(extent.offset)
        return file.read(extent.num_bytes)


def in_blocks(recipes: LayerRecipes) -> bool:
    copies = recipes.copies(0) or ()
    return all(at % BLOCK_BYTES == extent.offset % BLOCK_BYTES for extent, at in copies)


def test_they_have_the_bytes_of_the_file_and_the_logits_of_others(model, monkeypatch):
    options: dict[str, Any] = {"host_memory": "50%"} | ON_DEMAND
    monkeypatch.setattr(layer_recipes, "MOST_WITH_GAPS", NEVER)
    with MoE(model, **options) as moe, torch.no_grad():
        assert not all(map(in_blocks, moe.engine.loader.recipes))
        expected = logits_of_steps(moe.model, IDS)
    monkeypatch.setattr(layer_recipes, "MOST_WITH_GAPS", ALWAYS)
    with MoE(model, **options) as moe, torch.no_grad():
        loader = moe.engine.loader
        assert all(map(in_blocks, loader.recipes))
        assert moe.engine.tiers[0].slots.slot_bytes % BLOCK_BYTES == 0
        assert torch.equal(logits_of_steps(moe.model, IDS), expected)
        for key in (key for keys in moe.engine.bookkeeping.keys for key in keys):
            slot = slot_of(moe, key)
            for extent, at in loader.recipes[key.moe_layer_idx].copies(key.expert_idx) or ():
                assert slot[at : at + extent.num_bytes] == bytes_of(extent)


def test_reads_are_of_whole_blocks_but_at_the_end_of_the_file(model, monkeypatch):
    monkeypatch.setattr(layer_recipes, "MOST_WITH_GAPS", ALWAYS)
    with MoE(model, host_memory="50%", **ON_DEMAND) as moe:
        slot_bytes = moe.engine.tiers[0].slots.slot_bytes
        for recipes, keys in zip(
            moe.engine.loader.recipes, moe.engine.bookkeeping.keys, strict=True
        ):
            for key in keys[:-1]:
                for extent, at in recipes.reads(key.expert_idx) or ():
                    assert extent.offset % BLOCK_BYTES == at % BLOCK_BYTES == 0
                    assert extent.num_bytes % BLOCK_BYTES == 0
                    assert 0 <= at <= at + extent.num_bytes <= slot_bytes
            last = recipes.reads(len(keys) - 1) or ()
            assert all(extent.end <= extent.file.stat().st_size for extent, _ in last)


A, B = Path("a"), Path("b")


def test_experts_that_differ_in_where_they_begin_stay_as_they_are(tiny_checkpoint, monkeypatch):
    """Those of the tiny model are smaller than a block, so that each begins elsewhere in one."""
    monkeypatch.setattr(layer_recipes, "MOST_WITH_GAPS", ALWAYS)
    with MoE(tiny_checkpoint, host_memory="50%", **ON_DEMAND) as moe:
        for recipes in moe.engine.loader.recipes:
            assert recipes.reads(1) == recipes.copies(1)
        plain = max(recipes.layout.slot_bytes for recipes in moe.engine.loader.recipes)
        assert moe.engine.tiers[0].slots.slot_bytes == plain + -plain % BLOCK_BYTES


class Parts:
    """A recipe whose parts are copied, each from one or two extents of a file."""

    def __init__(self, extents: list[list[list[Extent]]]) -> None:
        self._extents = extents  # of each expert, of each part
        self.stored: list[ParamSpec] = []

    def slot_shapes(self) -> dict[str, Any]:
        sizes = [sum(extent.num_bytes for extent in part) for part in self._extents[0]]
        return {f"part {i}": ((size,), "uint8") for i, size in enumerate(sizes)}

    def lay_out(self, specs: dict[str, ParamSpec], *, is_transposed: bool) -> None:
        self.stored = [specs[name] for name in self.slot_shapes()]

    def copies(self, expert_idx: int) -> list[Copy]:
        found = []
        for spec, part in zip(self.stored, self._extents[expert_idx], strict=True):
            at = spec.offset
            for extent in part:
                found.append((extent, at))
                at += extent.num_bytes
        return found


def some_extents(seed: int) -> list[list[list[Extent]]]:
    """Of up to 3 experts, whose parts lie in any order in one or two files, some with gaps."""
    rng = random.Random(seed)
    sizes = [
        [rng.choice((24, 64, 4096, 4160, 8192)) for _ in range(rng.choice((1, 1, 2)))]
        for _ in range(rng.randint(1, 4))
    ]
    places = [(part, half) for part, own in enumerate(sizes) for half in range(len(own))]
    if rng.random() < 0.5:
        rng.shuffle(places)
    gaps = {place: rng.choice((0, 0, 8, 4096)) for place in places}
    files = {place: rng.choice((A, A, A, B)) for place in places}
    num_experts = rng.randint(1, 3)
    order = [(i, place) for i in range(num_experts) for place in places]
    if rng.random() < 0.5:  # as in GGUF files
        order = [(i, place) for place in places for i in range(num_experts)]
    found = [[[Extent(A, 0, size) for size in own] for own in sizes] for _ in range(num_experts)]
    ends = {A: 104, B: 4096}
    for expert_idx, (part, half) in order:
        file = files[part, half]
        extent = Extent(file, ends[file] + gaps[part, half], sizes[part][half])
        found[expert_idx][part][half] = extent
        ends[file] = extent.end
    return found


def test_the_rest_of_a_block_overwrites_nothing(monkeypatch):
    monkeypatch.setattr(layer_recipes, "MOST_WITH_GAPS", ALWAYS)
    num_moved = 0
    for seed in range(300):
        extents = some_extents(seed)
        recipes = LayerRecipes([Parts(extents)], is_transposed=False)  # type: ignore[list-item]
        slot_bytes = recipes.slot_bytes(len(extents), in_blocks=True)
        recipes.lie_in_blocks(len(extents))
        moved = recipes.layout
        assert all(a.offset + a.num_bytes <= b.offset for a, b in pairwise(moved.params))
        recipes.lie_in_blocks(len(extents))  # as for experts of two layers
        assert recipes.layout == moved
        copies = [recipes.copies(i) or () for i in range(len(extents))]
        for expert_idx, own in enumerate(copies):
            reads = recipes.reads(expert_idx) or []
            num_moved += reads != own
            for extent, at in [*reads, *cut(reads)]:
                assert 0 <= at <= at + extent.num_bytes <= slot_bytes
                assert extent.end <= max(
                    e.end for c in copies for e, _ in c if e.file == extent.file
                )
                for wanted, begin in own:  # what both fill is the same byte of the file
                    is_apart = at + extent.num_bytes <= begin or begin + wanted.num_bytes <= at
                    same = extent.file, extent.offset - at
                    assert is_apart or same == (wanted.file, wanted.offset - begin), seed
    assert num_moved > 50


def test_whole_blocks_end_with_what_is_known_of_a_file():
    copies = [(Extent(A, 4100, 100), 4), (Extent(A, 12_300, 4096), 8204), (Extent(B, 0, 4096), 0)]
    ends = {A: 20_000, B: 4096}
    assert in_whole_blocks(copies, ends) == [
        (Extent(A, 4096, 4096), 0),
        (Extent(A, 12_288, 20_000 - 12_288), 8192),
        (Extent(B, 0, 4096), 0),
    ]
