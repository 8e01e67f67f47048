"""The nouns: which expert, where it can be, how its bytes are laid out, and one forward pass. No
behaviour, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Ints = NDArray[np.int64]

PARAM_ALIGNMENT = 64  # bytes; a cache line, so that no two parameters of a slot share one

COMPUTE_DTYPES = ("float32", "bfloat16", "float16", "float64")
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e8m0fnu": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class ExpertKey(NamedTuple):
    """One routed expert. The key is the MoE layer, not the decoder layer, which may own two sets of
    experts (ERNIE-VL).
    """

    moe_layer_idx: int  # position among the model's experts modules, in model order
    expert_idx: int  # routed expert within that MoE layer


class Tier(Enum):
    """A kind of memory an expert can be in, fastest first. The compute tier is DEVICE with a GPU,
    HOST without.
    """

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Residency(Enum):
    """State of an expert with regard to the slots of one tier; absent is `None`."""

    LOADING = "loading"
    RESIDENT = "resident"


class Phase(Enum):
    """Kind of a step: the prompt at once, or one token per sequence."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass as the model was called: B sequences of S new tokens, flattened to T = B *
    S; or, with `sequence_T`, T tokens of some of B sequences.
    """

    phase: Phase
    num_sequences: int  # B
    tokens_per_sequence: int  # S
    begins_B: NDArray[np.bool_]  # this step is the first of the sequence's request
    counted_T: NDArray[np.bool_] | None = None  # False for padding; None: every token counts
    token_ids_T: Ints | None = None  # None when the model was called with embeddings
    sequence_T: Ints | None = None  # which sequence each token belongs to; None: S tokens of each
    context: int = 0  # tokens of the longest sequence with the new ones; 0: not known

    @property
    def num_tokens(self) -> int:
        if self.sequence_T is not None:
            return len(self.sequence_T)
        return self.num_sequences * self.tokens_per_sequence

    @property
    def num_counted(self) -> int:
        """The number of tokens that count."""
        return self.num_tokens if self.counted_T is None else int(self.counted_T.sum())

    @property
    def counted_token_ids_T(self) -> Ints:
        """The ids of the tokens that count, -1 where unknown."""
        ids_T = self.token_ids_T
        if ids_T is None:
            ids_T = np.full(self.num_tokens, -1)
        return ids_T if self.counted_T is None else ids_T[self.counted_T]

    @property
    def sequence_of_token_T(self) -> Ints:
        """The sequence that each counted token belongs to."""
        sequence_T = self.sequence_T
        if sequence_T is None:
            sequence_T = np.repeat(np.arange(self.num_sequences), self.tokens_per_sequence)
        return sequence_T if self.counted_T is None else sequence_T[self.counted_T]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter of one expert, as it lies in a slot."""

    name: str  # attribute of the experts module, e.g. "gate_up_proj"
    shape: tuple[int, ...]  # without the expert dimension
    dtype: str  # torch's name, e.g. "bfloat16"
    offset: int  # bytes from the start of the slot

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """How the parameters of one expert lie in a slot, one after the other, each aligned."""

    params: tuple[ParamSpec, ...]

    @classmethod
    def of(cls, shapes: dict[str, tuple[tuple[int, ...], str]]) -> ExpertLayout:
        """Lay parameters out, from {name: (shape without the expert dimension, dtype name)}, in
        that order.
        """
        params = []
        offset = 0
        for name, (shape, dtype) in shapes.items():
            spec = ParamSpec(name, shape, dtype, offset)
            params.append(spec)
            offset += -(-spec.num_bytes // PARAM_ALIGNMENT) * PARAM_ALIGNMENT
        return cls(tuple(params))

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights themselves, without alignment."""
        return sum(spec.num_bytes for spec in self.params)

    @property
    def slot_bytes(self) -> int:
        """Bytes a slot needs, alignment included."""
        last = self.params[-1]
        return last.offset + -(-last.num_bytes // PARAM_ALIGNMENT) * PARAM_ALIGNMENT


# An expert that is used where its files are mapped: its parts, by the names of the layout.
MappedExpert = Mapping[str, memoryview]

NO_EXPERT = -1  # in place of an expert id: the pair has none


class Routing(NamedTuple):
    """Expert ids and weights of every token, and which experts that activates."""

    num_tokens: int  # T
    activated: list[int]  # distinct expert ids, ascending
    counts: Ints | int  # pairs of each activated expert; 1 if that is one each
    num_without: int  # pairs that have no expert
    top_k_index_TK: Ints | None  # on the host; NO_EXPERT: no expert; None: not known by token
    # Where the model computes; None: the caller of the experts weighs.
    top_k_weights_TK: Tensor | None

    @classmethod
    def of(cls, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Routing:
        """Make a Routing of the results of a router. The CPU waits here for the device."""
        return cls.of_experts(top_k_index_TK.cpu().numpy(), top_k_weights_TK)

    @classmethod
    def of_experts(cls, top_k_index_TK: Ints, top_k_weights_TK: Tensor | None) -> Routing:
        """Make a Routing of expert ids that are on the host already."""
        num_tokens = len(top_k_index_TK)
        if num_tokens == 1:  # a decode step: numpy would take longer
            chosen = top_k_index_TK[0].tolist()
            if NO_EXPERT in chosen:
                chosen = [expert_idx for expert_idx in chosen if expert_idx != NO_EXPERT]
            activated = sorted(set(chosen))
            if len(activated) == len(chosen):
                num_without = top_k_index_TK.size - len(chosen)
                return cls(1, activated, 1, num_without, top_k_index_TK, top_k_weights_TK)
        found, counts = distinct(top_k_index_TK[top_k_index_TK != NO_EXPERT])
        num_without = top_k_index_TK.size - int(counts.sum())
        return cls(
            num_tokens, found.tolist(), counts, num_without, top_k_index_TK, top_k_weights_TK
        )


def distinct(expert_idxs: Ints) -> tuple[Ints, Ints]:
    """Return the distinct experts, in order, and how often each occurs: as `numpy.unique` does, in
    a fraction of its time.
    """
    counts_E = np.bincount(expert_idxs.ravel())
    (found,) = counts_E.nonzero()
    return found, counts_E[found]


def rows_of_experts(routing: Routing) -> dict[int, slice]:
    """The pairs of each activated expert among all pairs sorted by expert. Pairs without one come
    first.
    """
    first = routing.num_without
    if isinstance(routing.counts, int):
        stops = [*range(first + 1, first + len(routing.activated) + 1)]
    else:
        stops = (routing.counts.cumsum() + first).tolist()
    return dict(zip(routing.activated, map(slice, [first, *stops], stops), strict=False))


def without_gaps(top_k_index_TK: Ints) -> Ints:
    """Expert ids for the recorder and the predictor, which do not know NO_EXPERT: it is replaced by
    another expert of the token, or by 0 if the token has none.
    """
    another_T1 = top_k_index_TK.max(axis=1, keepdims=True).clip(0)
    return np.where(top_k_index_TK == NO_EXPERT, another_T1, top_k_index_TK)
