"""The header of a safetensors file: which tensor lies where in it.

The library of the format checks a header when it opens a file: names, dtypes and shapes are well
formed, and the tensors fill the file without a gap. So where one lies follows from the sizes of
those before it.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from moe_infinity.checkpoint.extents import STORED_DTYPES, Extent, StoredTensor
from moe_infinity.errors import CheckpointError


def read_safetensors(file: Path) -> tuple[list[StoredTensor], int]:
    """The tensors of a file and how many bytes it took to know them. Raises CheckpointError."""
    try:
        with safe_open(file, framework="np") as opened:
            slices = [(name, opened.get_slice(name)) for name in opened.offset_keys()]
            found = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices]
    except SafetensorError as error:
        raise CheckpointError(
            f"{file}: not a whole safetensors file: {error}\n"
            "hint: truncated or damaged: download it again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from error
    tensors = []
    end = 0  # of the tensors so far, from the first byte of data
    for name, dtype, shape in found:
        if dtype not in STORED_DTYPES:
            raise CheckpointError(
                f"{file}: tensor {name} has dtype {dtype}, which is not supported"
            )
        num_bytes = prod(shape) * STORED_DTYPES[dtype][1] // 8
        tensors.append((name, dtype, shape, end, num_bytes))
        end += num_bytes
    header_bytes = file.stat().st_size - end
    return [
        StoredTensor(name, dtype, shape, Extent(file, header_bytes + start, num_bytes))
        for name, dtype, shape, start, num_bytes in tensors
    ], header_bytes
