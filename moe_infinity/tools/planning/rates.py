"""Rates of this machine's memory, products and GPU, measured in a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from moe_infinity.kernels.many_rows import has_products_of_bfloat16
from moe_infinity.system.machine import available_memory_bytes, num_cores, own_bytes
from moe_infinity.system.memory import huge_pages
from moe_infinity.system.process_limits import lockable_bytes
from moe_infinity.tools.planning.machine import RUNTIME_BYTES, PlanMachine

MEASURE_S = 0.4
READ_BYTES = 512 << 20  # by all threads together: more than caches hold
COPIED_BYTES = 256 << 20  # to a GPU
NEW_BYTES = 2 << 30
NEW_S = 1.5
PIECE_BYTES = 8 << 20  # that a thread uses at once
SMALLEST_PAGE = 4096  # bytes, of all systems
ROWS = 38  # of an expert's product in a prompt of 600 tokens, [ROWS, COLUMNS] x [COLUMNS, OUTPUTS]
COLUMNS = 2048
OUTPUTS = 1536


def memory_rate(num_threads: int) -> float:
    """Bytes per second that threads read together, of memory larger than the caches. The fastest of
    a few rounds: others use it, too.
    """
    most = min(READ_BYTES, available_memory_bytes() // 4)
    buffers = [np.ones(max(most // num_threads // 8, 1)) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:
        seconds = _fastest(lambda: list(pool.map(np.max, buffers)))
    return sum(buffer.nbytes for buffer in buffers) / seconds


def new_memory_rate(num_threads: int) -> float:
    """Bytes per second of huge pages that the system gives to all threads together.

    Of up to half of what is free: the first pages are those that somebody has just given back, and
    come faster. Where the machine is virtual, the host may have to give the others first.
    """
    num_pieces = max(min(NEW_BYTES, available_memory_bytes() // 2) // PIECE_BYTES, 1)
    memory_N = np.frombuffer(huge_pages(num_pieces * PIECE_BYTES), np.uint8)
    rest = iter(np.split(memory_N, num_pieces))  # of a list: threads may share it
    started = time.perf_counter()
    give_up_at = started + NEW_S

    def use() -> int:
        num_bytes = 0
        for piece_N in rest:
            piece_N[::SMALLEST_PAGE] = 1
            num_bytes += piece_N.nbytes
            if time.perf_counter() > give_up_at:
                break
        return num_bytes

    with ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(use) for _ in range(num_threads)]
        num_bytes = sum(future.result() for future in futures)
    return num_bytes / (time.perf_counter() - started)


def products_rate() -> float:
    """Operations per second of an expert's product, as prompts of bfloat16 models have it: torch's
    where the processor has products of bfloat16 (our panels of packed weights reach 0.8 of that on
    Zen 4), else that of our kernels.
    """
    weight = torch.ones(OUTPUTS, COLUMNS, dtype=torch.bfloat16, device="cpu")
    x = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16, device="cpu")
    multiply: Callable[[], object]
    if has_products_of_bfloat16():

        def multiply() -> object:
            return torch.nn.functional.linear(x, weight)
    else:
        from moe_infinity.kernels.cpu.linear import fused_linear  # imports numba

        linear = fused_linear([weight])
        assert linear is not None

        def multiply() -> object:
            return linear(x)

    multiply()  # compiles, or wakes threads up
    return 2.0 * ROWS * COLUMNS * OUTPUTS / _fastest(multiply)


def _fastest(work: Callable[[], object]) -> float:
    """Seconds."""
    give_up_at = time.perf_counter() + MEASURE_S
    fastest = float("inf")
    while (started := time.perf_counter()) < give_up_at:
        work()
        fastest = min(fastest, time.perf_counter() - started)
    return fastest


def find_gpu() -> tuple[str, float] | None:
    """Its name and free bytes."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(), float(torch.cuda.mem_get_info()[0])


def link_rate() -> float:
    """Bytes per second from page-locked memory to the GPU."""
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    return _gpu_copies(source)


def gpu_memory_rate() -> float:
    """Bytes per second that the GPU reads of its own memory: a copy reads and writes."""
    return 2 * _gpu_copies(torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda"))


def _gpu_copies(source: torch.Tensor) -> float:
    target = torch.empty(len(source), dtype=torch.uint8, device="cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    copy()
    return len(source) / _fastest(copy)


MEASURED = ("disk", "memory", "new_memory", "products", "link", "gpu_memory")


def this_machine(
    measures: dict[str, Callable[[], float]], gpu: tuple[str, float] | None
) -> PlanMachine:
    """`measures` gives a rate by its name; what it lacks is assumed. Raises what they raise."""
    own = own_bytes()
    lockable = lockable_bytes()
    machine = PlanMachine(
        cores=num_cores(),
        ram=available_memory_bytes() + own,
        runtime=own or RUNTIME_BYTES,
        lockable=float("inf") if lockable is None else lockable,
        gpu=0 if gpu is None else gpu[1],
        gpu_name="none" if gpu is None else gpu[0],
    )
    wanted = [name for name in MEASURED if gpu is not None or name not in ("link", "gpu_memory")]
    rates = {name: measures[name]() for name in wanted if name in measures}
    return replace(machine, **rates, assumed=frozenset(wanted) - rates.keys())  # type: ignore[arg-type]
