"""How fast can the disk and the memory of this machine be, and what of it does the Reader reach?

    python benchmarks/copy_bandwidth.py runs/big

Random reads of the size of one expert: past the page cache by 1-8 threads, and through it, cold and
warm. Memory read and copied by 1 and 2 threads. Against them the Reader, which brings whole experts
into HOST slots: several at once, as a layer asks for them, and one at a time. All are measured in
turn, several times; medians count. CPU time tells what a read takes from computing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from mmap import PAGESIZE, mmap
from pathlib import Path

import numpy as np
from limits import drop_from_page_cache

CELL_S = 1.0  # how long one measurement runs
WARM_BYTES = 256 << 20
SEQUENTIAL_BYTES = 1 << 20  # of one read in file order
NUM_SLOTS = 16

Work = Callable[[random.Random], int]  # does something and gives the bytes of it


def rate(make_work: Callable[[], Work], num_threads: int) -> tuple[float, float]:
    """GB per second of threads that work for a while, and seconds of CPU time per GB."""
    works = [make_work() for _ in range(num_threads)]
    started, cpu_started = time.perf_counter(), time.process_time()

    def run(work: Work) -> int:
        rng, done = random.Random(id(work)), 0
        while time.perf_counter() < started + CELL_S:
            done += work(rng)
        return done

    with ThreadPoolExecutor(num_threads) as pool:
        gb = sum(pool.map(run, works)) / 1e9
        return gb / (time.perf_counter() - started), (time.process_time() - cpu_started) / gb


class Disk:
    """Random reads of whole pages from the shards of a checkpoint."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._block_bytes = block_bytes - block_bytes % PAGESIZE
        found = {file: file.stat().st_size for file in sorted(folder.glob("*.safetensors"))}
        self.files = {file: size for file, size in found.items() if size > block_bytes}

    def reads(self, *, is_direct: bool, within_bytes: int | None = None) -> Work:
        """Of the first bytes of the first file if `within_bytes` is given."""
        files = self._opened(is_direct=is_direct)
        if within_bytes is not None:
            files = [(files[0][0], within_bytes)]
        buffer = self._buffer()

        def read(rng: random.Random) -> int:
            file, size = rng.choice(files)
            at = rng.randrange((size - self._block_bytes) // PAGESIZE + 1) * PAGESIZE
            return os.preadv(file.fileno(), [buffer], at)

        return read

    def reads_in_order(self) -> Callable[[], Work]:
        """Makes the work of threads that share the files' blocks, one after another."""
        places = itertools.cycle(
            (file, at)
            for file, size in self._opened(is_direct=True)
            for at in range(0, size - self._block_bytes + 1, self._block_bytes)
        )

        def make_work() -> Work:
            buffer = self._buffer()

            def read(_: random.Random) -> int:
                file, at = next(places)  # safe among threads
                return os.preadv(file.fileno(), [buffer], at)

            return read

        return make_work

    def _opened(self, *, is_direct: bool) -> list[tuple[FileIO, int]]:
        flags = os.O_RDONLY | (os.O_DIRECT if is_direct else 0)
        opener = partial(self._open, flags)
        return [(open(file, "rb", 0, opener=opener), size) for file, size in self.files.items()]

    def _buffer(self) -> mmap:
        buffer = mmap(-1, self._block_bytes)
        buffer.write(bytes(self._block_bytes))  # fault it in
        return buffer

    @staticmethod
    def _open(flags: int, file: str, _: int) -> int:
        return os.open(file, flags)


def disk_bandwidth(folder: Path, block_bytes: int, num_threads: int = 4) -> float:
    """Bytes per second of random reads past the page cache."""
    return rate(partial(Disk(folder, block_bytes).reads, is_direct=True), num_threads)[0] * 1e9


def sequential_bandwidth(folder: Path, num_threads: int = 4) -> float:
    """Bytes per second of reads past the page cache in the order of the files."""
    return rate(Disk(folder, SEQUENTIAL_BYTES).reads_in_order(), num_threads)[0] * 1e9


def memory_bandwidth(num_threads: int) -> float:
    """Bytes per second that threads read together."""
    return rate(partial(memory_work, is_copy=False), num_threads)[0] * 1e9


def memory_work(*, is_copy: bool, num_bytes: int = 64 << 20) -> Work:
    """Reads, or copies, memory much larger than the caches."""
    source, target = np.ones(num_bytes // 8), np.zeros(num_bytes // 8)

    def work(_: random.Random) -> int:
        if is_copy:
            np.copyto(target, source)
        else:
            source.max()
        return num_bytes

    return work


def reader_cells(folder: Path, num_threads: int) -> dict[str, Callable[[], tuple[float, float]]]:
    """The Reader with whole experts, as Mover and runtime use it."""
    from moe_infinity.checkpoint.reader import Reader
    from moe_infinity.loading.model import plan_from_headers
    from moe_infinity.memory.slots import HostSlots

    plan = plan_from_headers(str(folder), dtype="auto")
    slots = HostSlots(NUM_SLOTS, max(recipes.layout.slot_bytes for recipes in plan.recipes))
    for slot_id in range(NUM_SLOTS):
        slots.bytes_of(slot_id)[:] = bytes(slots.slot_bytes)
    free = list(range(NUM_SLOTS))  # append and pop are safe among threads
    reader = Reader(num_threads=num_threads)

    def load(rng: random.Random) -> int:
        row, slot_id = rng.randrange(len(plan.layers)), free.pop()
        expert_idx = rng.randrange(plan.layers[row].num_experts)
        plan.recipes[row].load(expert_idx, reader, slots.bytes_of(slot_id))
        free.append(slot_id)
        return plan.recipes[row].bytes_per_expert()

    return {
        "reader": partial(rate, lambda: load, num_threads),
        "reader, one expert at a time": partial(rate, lambda: load, 1),
    }


def main() -> None:
    from moe_infinity.cli.inspection import inspect_checkpoint

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--read-threads", type=int, default=4, help="of the Reader")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    block_bytes = inspect_checkpoint(str(args.model)).bytes_per_expert
    disk = Disk(args.model, block_bytes)
    cells: dict[str, Callable[[], tuple[float, float]]] = {}
    for num_threads in (1, 2, 4, 8):
        cells[f"disk, threads {num_threads}"] = partial(
            rate, partial(disk.reads, is_direct=True), num_threads
        )
    cells |= reader_cells(args.model, args.read_threads)
    for name, within_bytes in {"cold": None, "warm": WARM_BYTES}.items():
        cells[f"page cache {name}, threads 4"] = partial(
            rate, partial(disk.reads, is_direct=False, within_bytes=within_bytes), 4
        )
    for verb, num_threads in ((verb, n) for verb in ("read", "copy") for n in (1, 2)):
        cells[f"memory {verb}, threads {num_threads}"] = partial(
            rate, partial(memory_work, is_copy=verb == "copy"), num_threads
        )
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cells}
    for _ in range(args.rounds):
        for name, measure in cells.items():
            drop_from_page_cache(args.model)
            if "warm" in name:
                next(iter(disk.files)).open("rb").read(WARM_BYTES)
            found[name].append(measure())
    result: dict[str, object] = {"benchmark": "copy_bandwidth", "expert_bytes": block_bytes}
    for name, rates in found.items():
        gb_per_s, cpu_s = (statistics.median(values) for values in zip(*rates, strict=True))
        result[name] = round(gb_per_s, 2)
        spread = f"{min(rates)[0]:5.2f}-{max(rates)[0]:.2f}"
        print(f"{name:30} {gb_per_s:6.2f} GB/s ({spread}), {cpu_s:.2f} s of CPU time per GB")
    ceiling = max(value for name, value in result.items() if name.startswith("disk"))
    result["reader_share_of_disk"] = round(result["reader"] / ceiling, 2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
