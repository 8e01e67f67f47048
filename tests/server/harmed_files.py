"""What may happen to a file on a disk. Each way takes a path and what chooses the details."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def truncated(path: Path, chance: random.Random) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def bit_flipped(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def swapped(path: Path, chance: random.Random) -> None:
    other = chance.choice(files_in(path.parent))
    one, two = path.read_bytes(), other.read_bytes()
    path.write_bytes(two)
    other.write_bytes(one)


def foreign(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.randbytes(chance.choice([0, 7, 100, 5000])))


def longer(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(100))


def linked(path: Path, chance: random.Random) -> None:
    target = chance.choice(
        [*files_in(path.parent), Path("/dev/zero"), Path("/nowhere"), path.parent]
    )
    path.unlink()
    path.symlink_to(target)


def a_pipe(path: Path, chance: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path, chance: random.Random) -> None:
    path.unlink()
    path.mkdir()


def readable_by_others(path: Path, chance: random.Random) -> None:
    path.chmod(0o644)


def gone(path: Path, chance: random.Random) -> None:
    path.unlink()


HARM: list[Callable[[Path, random.Random], None]] = [
    truncated, bit_flipped, swapped, foreign, longer, linked, a_pipe, a_folder, readable_by_others,
    gone,
]  # fmt: skip
