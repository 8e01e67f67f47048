"""The memory that parts of a layer need while they compute, found by running them on the meta
device: no config says how many copies of its numbers a linear attention or a Mamba makes.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FEW_TOKENS = 32  # some parts fill up a chunk of up to 256 tokens
MANY_TOKENS = 512


class PartBytes(NamedTuple):
    """The most bytes that a part of a layer allocates for a while."""

    least: int = 0  # of any prompt
    per_token: int = 0  # of a longer one


def part_bytes_of(model: Any, experts: Collection[str]) -> PartBytes:
    """Return the needs of the hungriest part beside these experts (names of modules) of a model on
    the meta device. Parts that need more than hidden states, as attention does, are left out.
    """
    width = getattr(model.config.get_text_config(), "hidden_size", 0)
    found = [PartBytes()]
    for part in _parts(model, experts):
        dtype = next((param.dtype for param in part.parameters()), torch.float32)
        few, many = (
            _peak_bytes(part, torch.empty(1, num_tokens, width, dtype=dtype, device="meta"))
            for num_tokens in (FEW_TOKENS, MANY_TOKENS)
        )
        found.append(PartBytes(few, many // MANY_TOKENS))
    return PartBytes(*map(max, zip(*found, strict=True)))


def _parts(model: nn.Module, experts: Collection[str]) -> Iterator[nn.Module]:
    """Yield one of each class of the children of layers that have no experts inside."""
    seen = set()
    for name, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList) or not _are_inside(experts, name):
            continue
        for path, part in layers.named_modules(prefix=name):
            is_child = path.count(".") == name.count(".") + 2  # of a layer
            if is_child and type(part) not in seen and not _are_inside(experts, path):
                seen.add(type(part))
                yield part


def _are_inside(experts: Collection[str], name: str) -> bool:
    """Return True if one of these modules is the named one, or a part of it."""
    return any(f"{expert}.".startswith(f"{name}.") for expert in experts)


def _peak_bytes(part: nn.Module, x_TD: Tensor) -> int:
    """The most bytes that live at once while it computes; 0 for a part that does not."""
    counter = _Counter()
    others = list(signature(part.forward).parameters.values())[1:]
    required = [
        p.name for p in others if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    try:
        with torch.inference_mode(), counter:
            part(x_TD, **dict.fromkeys(required))
    except Exception:  # it needs more than hidden states, or numbers
        return 0
    return counter.peak


class _Counter(TorchDispatchMode):
    """Counts the bytes of the storages that operations make inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._living = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._living += storage.nbytes()
            self.peak = max(self.peak, self._living)
            weakref.finalize(storage, self._end, storage._cdata, storage.nbytes())

    def _end(self, address: int, num_bytes: int) -> None:
        self._seen.discard(address)
        self._living -= num_bytes
