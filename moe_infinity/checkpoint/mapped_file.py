"""A file of a checkpoint as memory that the page cache backs, on systems that do this safely."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from moe_infinity.checkpoint.chunks import Chunk
from moe_infinity.system.memory import address_of, make_present, map_file


class MappedFile:
    """All bytes of a file. What `populate` has made present may be read like any memory; if the
    system needs the memory, it drops the bytes and reads them again when somebody looks at them.
    The mapping goes when nobody has a part of `bytes` any more. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes = memoryview(map_file(path))
        self._address = address_of(self.bytes)

    def has(self, chunk: Chunk) -> bool:
        """Whether a chunk of the file is to be read to where the file is mapped."""
        return address_of(chunk.parts[0]) == self._address + chunk.offset

    def populate(self, offset: int, num_bytes: int) -> None:
        """Make these bytes present, for any thread. Raises OSError, ENODATA if the file has become
        shorter.
        """
        try:
            make_present(self._address + offset, num_bytes)
        except OSError as error:
            code = error.errno or errno.EIO
            if code == errno.EFAULT:  # for all that would be a bus error
                is_short = os.stat(self._path).st_size < offset + num_bytes
                code = errno.ENODATA if is_short else errno.EIO
            raise OSError(code, os.strerror(code)) from error
