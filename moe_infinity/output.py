"""Files that are complete or do not exist: they are written beside their name and renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


def why_unwritable(path: Path) -> str | None:
    """What is wrong with the place of a file, to be said before the work that fills it; None if
    nothing is known to be.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    if path.is_dir() or not os.access(folder, os.W_OK):
        return "no file can be written there"
    return None


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write. It has its name at the end of the block; after an error there is neither a
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
