"""An embedding whose rows are read where they are stored, as tokens look them up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

_TENSOR: Any = Tensor
# What a weight answers without its values.
FACTS = {
    *(
        getattr(_TENSOR, name).__get__
        for name in (
            "device", "dtype", "grad", "is_quantized", "is_sparse", "itemsize", "layout", "nbytes",
            "ndim", "requires_grad", "shape",
        )
    ),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__,
}  # fmt: skip
THE_SAME = {_TENSOR.data.__get__, Tensor.detach}
WRITES = {Tensor.__setitem__, Tensor.set_, Tensor.resize_, _TENSOR.data.__set__}


CANNOT_CHANGE = (
    "this weight stays as the checkpoint stores it and cannot be changed\n"
    "hint: put a module of torch with a clone of the weight in its place"
)


class StoredRows(Protocol):
    """A weight [R, C] whose rows can be looked up."""

    @property
    def kind(self) -> str:
        """How rows are stored: a dtype, or the name of a packed format."""

    @property
    def num_bytes(self) -> int:
        """On disk."""

    def look_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return [*ids.shape, C] in `dtype`."""

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return [R, C]."""


class KeepsStoredWeight(nn.Module):
    """A module whose `weight` is no parameter: it stays as the checkpoint stores it."""

    dtype: torch.dtype  # that the weight is read in

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Raise RuntimeError for a weight that somebody sets."""
        if name == "weight":
            raise RuntimeError(CANNOT_CHANGE)
        super().register_parameter(name, param)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if f"{prefix}weight" in state_dict:
            raise RuntimeError(f"{prefix}weight: {CANNOT_CHANGE}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Cast the module, as `float()` does: the weight stays as it is stored."""
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device="cpu")).dtype
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class StoredEmbedding(KeepsStoredWeight, nn.Embedding):
    """An embedding in the place of an `nn.Embedding`. What its class does beside the look-up, such
    as scaling, goes on. Other readers of `weight` get all rows, anew each time.
    """

    rows: StoredRows

    @staticmethod
    def take_over(embedding: nn.Embedding, rows: StoredRows, dtype: torch.dtype) -> None:
        """Let an embedding, whose parameter was taken out, look up `rows` from now on."""
        own = type(embedding)
        name = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        bases = (StoredEmbedding,) if own is nn.Embedding else (own, StoredEmbedding)
        embedding.__class__ = type(own.__name__, bases, name)
        vars(embedding).update(rows=rows, dtype=dtype)

    @staticmethod
    def can_take_over(embedding: nn.Embedding) -> bool:
        """Return True if the class of an embedding looks rows up by `nn.Embedding` and needs no
        more of the weight: by trying, with rows of zeros.
        """
        if embedding.max_norm is not None or isinstance(embedding, StoredEmbedding):
            return False
        tried = copy.copy(embedding)
        vars(tried).update(_parameters={}, _buffers=dict(embedding._buffers))
        rows = _Zeros(embedding.embedding_dim)
        StoredEmbedding.take_over(tried, rows, torch.float32)
        for name, buffer in tried._buffers.items():
            if buffer is not None:
                tried._buffers[name] = torch.ones_like(buffer, device="cpu")
        try:
            found = tried(torch.zeros(1, 1, dtype=torch.long, device="cpu"))
        except Exception:
            return False
        return rows.num_looked_up == 1 and found.shape == (1, 1, embedding.embedding_dim)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[R, C]"""
        shape = self.num_embeddings, self.embedding_dim
        return StoredWeight.of(shape, self.dtype, self.rows.whole)

    def forward(self, input: Tensor) -> Tensor:
        return self.rows.look_up(input, self.dtype)


class _Zeros:
    """Rows for a trial: all are zeros, and there is no more than rows."""

    kind = "zeros"
    num_bytes = 0

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self.num_looked_up = 0

    def look_up(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        self.num_looked_up += 1
        return torch.zeros(*ids.shape, self._num_columns, dtype=dtype, device="cpu")

    def whole(self, dtype: torch.dtype) -> Tensor:
        raise LookupError("the trial has no whole weight")


class StoredWeight(Tensor):
    """A weight that stays as it is stored. Its values are read when somebody computes with them."""

    _whole: Callable[[torch.dtype], Tensor]

    @staticmethod
    def of(
        shape: tuple[int, ...], dtype: torch.dtype, whole: Callable[[torch.dtype], Tensor]
    ) -> StoredWeight:
        """`whole` gives the values."""
        weight = torch.empty(1, dtype=dtype, device="cpu").expand(shape).as_subclass(StoredWeight)
        weight._whole = whole
        return weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in THE_SAME:
            return args[0]
        name = getattr(func, "__name__", "")
        is_in_place = name.endswith("_") and not name.startswith("__")
        is_in_place |= func in WRITES or (name.startswith("__i") and name != "__invert__")
        target = (args[:1], kwargs.get("out")) if is_in_place else kwargs.get("out")
        if any(isinstance(leaf, StoredWeight) for leaf in tree_leaves(target)):
            raise RuntimeError(CANNOT_CHANGE)
        return func(*tree_map(_values, args), **tree_map(_values, kwargs))


def row_bytes_by_type(model: nn.Module) -> dict[str, int]:
    """Return the bytes of the embeddings that are read by row, by dtype or kind of packing."""
    sizes: dict[str, int] = {}
    for module in model.modules():
        if isinstance(module, StoredEmbedding):
            sizes[module.rows.kind] = sizes.get(module.rows.kind, 0) + module.rows.num_bytes
    return sizes


def _values(value: Any) -> Any:
    if isinstance(value, StoredWeight):
        return value._whole(value.dtype)
    return value
