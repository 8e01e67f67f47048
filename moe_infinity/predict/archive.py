"""Arrays in one .npz file that is complete or does not exist."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_infinity.errors import TraceError
from moe_infinity.output import whole_file

# What numpy and zipfile raise at files that are no archive of arrays; RuntimeError when encrypted,
# MemoryError when an array claims to be larger than anything.
DAMAGED = (OSError, ValueError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


def write_arrays(path: Path, arrays: Mapping[str, Any], *, what: str) -> None:
    """Write `arrays`, a "trace" or whatever they are, to `path`. Raises TraceError, and leaves
    neither a partial file nor a changed old one.
    """
    try:
        with whole_file(path) as file:
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise TraceError(
            f"{path}: the {what} could not be written: {error.strerror or error}"
        ) from error


def read_arrays(path: Path, *, expected: set[str]) -> dict[str, NDArray[Any]]:
    """All arrays of a file that has at least the expected ones. Raises one of DAMAGED."""
    with path.open("rb") as stream:
        file = np.load(stream, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise ValueError("one array, not an archive of arrays")
        arrays = {name: file[name] for name in file.files}
    if not expected <= arrays.keys():
        raise ValueError(
            f"arrays {sorted(arrays)}, expected at least {' and '.join(sorted(expected))}"
        )
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise ValueError("an archive of other files than arrays")
    return arrays
