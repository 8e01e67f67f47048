"""Files that are complete or do not exist: they are written beside their name and renamed. Arrays
in one such .npz file.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from moe_infinity.errors import TraceError

# What numpy and zipfile raise at files that are no archive of arrays; RuntimeError when encrypted,
# MemoryError when an array claims to be larger than anything.
DAMAGED = (OSError, ValueError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


def why_unwritable(path: Path) -> str | None:
    """The reason why no file can be written there, to be said before the work that fills it; None
    if none is known.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    if path.is_dir() or not os.access(folder, os.W_OK):
        return "no file can be written there"
    return None


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write. It gets its name at the end of the block; after an error there is neither a
    partial file nor a changed old one. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_arrays(path: Path, arrays: Mapping[str, Any], *, what: str) -> None:
    """Write `arrays` to one .npz file; `what` names them in a message. Raises TraceError, and
    leaves neither a partial file nor a changed old one.
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
