"""The nouns: which expert, how its bytes are laid out, where it can be. No behaviour, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

PARAM_ALIGNMENT = 64  # bytes; a cache line, so that no two parameters of a slot share one

COMPUTE_DTYPES = ("float32", "bfloat16", "float16", "float64")
DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e8m0fnu": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class ExpertKey(NamedTuple):
    """One routed expert. Rows, not decoder layers, are the key: a layer may own two sets of experts
    (ERNIE-VL).
    """

    moe_layer_idx: int  # position among the model's experts modules, in model order
    expert_idx: int  # routed expert within that row


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
        """From {name: (shape without the expert dimension, dtype name)}, in that order."""
        params, offset = [], 0
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
