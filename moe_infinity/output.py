"""Files that are complete or do not exist: they are written beside their name and renamed. Arrays
in one such .npz file.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from moe_infinity.errors import TraceError
from moe_infinity.printable import printable
from moe_infinity.system.files import create_new, name_beside

MOST_ARRAYS = 64  # a history has 20
MOST_SHOWN = 400  # characters of names in an error

# What numpy and zipfile raise at files that are no archive of arrays; RuntimeError when encrypted,
# MemoryError when an array claims to be larger than anything.
DAMAGED = (OSError, ValueError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error)


def why_unwritable(path: Path) -> str | None:
    """The reason why no file can be written there, to be said before the work that fills it; None
    if none is known.
    """
    real = os.path.realpath(path)
    folder = os.path.dirname(real)
    if not os.path.isdir(folder):
        return f"the folder {folder} does not exist"
    if (os.path.exists(real) and not os.path.isfile(real)) or not os.access(folder, os.W_OK):
        return "no file can be written there"
    return None


@contextmanager
def whole_file(path: Path, *, is_private: bool = False) -> Iterator[BinaryIO]:
    """A file to write. It gets its name at the end of the block; after an error there is neither a
    partial file nor a changed old one. A link stays one. A private file is for its owner alone.
    Raises OSError.
    """
    path = Path(os.path.realpath(path))
    partial = name_beside(path)
    try:
        with os.fdopen(create_new(partial, 0o600 if is_private else 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def write_arrays(path: Path, arrays: Mapping[str, Any], *, what: str) -> None:
    """Write `arrays` to one .npz file for its owner; `what` names them in a message. Raises
    TraceError, and leaves neither a partial file nor a changed old one.
    """
    try:
        with whole_file(path, is_private=True) as file:
            np.savez_compressed(file, **arrays)
    except OSError as error:
        raise TraceError(
            f"{path}: the {what} could not be written: {error.strerror or error}"
        ) from error


def read_arrays(
    path: Path, *, expected: set[str], make_room: Callable[[int], object] = lambda num_bytes: None
) -> dict[str, NDArray[Any]]:
    """All arrays of a file that has at least the expected ones. Names and sizes are looked at
    before contents; then `make_room` is asked for the memory that has to be free. Raises one of
    DAMAGED.
    """
    from moe_infinity.system.machine import available_memory_bytes  # needs psutil

    with path.open("rb") as stream:
        names, num_bytes = _names_in(stream)
        if not expected <= names:
            found = printable(sorted(names), MOST_SHOWN)
            wanted = " and ".join(sorted(expected))
            raise ValueError(f"arrays {found}, expected at least {wanted}")
        make_room(2 * min(num_bytes, os.fstat(stream.fileno()).st_size))
        most = available_memory_bytes() // 2
        if num_bytes > most:
            raise MemoryError(f"arrays of {num_bytes} bytes, and there is memory for {most}")
        stream.seek(0)
        file = np.load(stream, allow_pickle=False)
        arrays = {name: file[name] for name in file.files}
    if not all(isinstance(array, np.ndarray) for array in arrays.values()):
        raise ValueError("an archive of other files than arrays")
    return arrays


def _names_in(stream: BinaryIO) -> tuple[set[str], int]:
    """The names of the arrays in an archive, and their bytes together. Raises ValueError for what
    is not one of ours.
    """
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
    names = [entry.filename.removesuffix(".npy") for entry in entries]
    if len(names) > MOST_ARRAYS or len(set(names)) < len(names):
        raise ValueError(f"{len(names)} arrays, expected at most {MOST_ARRAYS} of different names")
    return set(names), sum(entry.file_size for entry in entries)
