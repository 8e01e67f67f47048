"""Importing torch and transformers and building a model take seconds, in which the disk would have
nothing to do. The files of a model that memory has room for are read into the page cache meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from moe_infinity.checkpoint.file_names import checkpoint_files, find_gguf, split_files
from moe_infinity.cluster.config import ClusterConfig
from moe_infinity.config import OffloadConfig
from moe_infinity.system import linux

LEAST_BYTES = 1 << 30  # smaller models are read fast enough
FREE_SHARE = 7 / 8  # of free memory that the files may take
PIECE_BYTES = 1 << 20  # read at once


@contextmanager
def reading_ahead(checkpoint: str, config: OffloadConfig) -> Iterator[None]:
    """Inside, a thread reads what the page cache lacks of a checkpoint's files, in their order. It
    reads nothing where a setting says that less than all is to be in memory, or if they do not
    fit. Errors are left to whoever loads the model.
    """
    files = _files_of(checkpoint, config)
    is_over = Event()
    thread = Thread(target=_read, args=(files, is_over), name="read-ahead", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()


def _files_of(checkpoint: str, config: OffloadConfig) -> list[Path]:
    """The files to bring into the page cache; [] for none."""
    is_limited = config.memory is not None or config.host_memory is not None
    is_shared = isinstance(config, ClusterConfig) and config.expert_hosts > 0
    if is_limited or is_shared or config.preload == "off" or not linux.is_linux():
        return []
    from moe_infinity.system.machine import available_memory_bytes  # and psutil

    try:
        gguf = find_gguf(checkpoint)
        files = checkpoint_files(Path(checkpoint)) if gguf is None else split_files(gguf)
        num_bytes = sum(file.stat().st_size for file in files)
        fits = LEAST_BYTES <= num_bytes <= available_memory_bytes() * FREE_SHARE
    except OSError:  # CheckpointError is one
        return []
    return files if fits else []


def _read(files: Sequence[Path], is_over: Event) -> None:
    scratch = bytearray(PIECE_BYTES)
    for file in files:
        with suppress(OSError), file.open("rb", buffering=0) as opened:
            for offset in range(0, file.stat().st_size, PIECE_BYTES):
                if is_over.is_set():
                    return
                if not _is_cached(opened.fileno(), offset):
                    opened.seek(offset)
                    opened.readinto(scratch)


def _is_cached(descriptor: int, offset: int) -> bool:
    try:
        return linux.is_cached(descriptor, offset, PIECE_BYTES)
    except OSError:  # this system does not say
        return False
