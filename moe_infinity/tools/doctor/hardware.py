"""Processor, memory, limits and GPU."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from moe_infinity.sizes import format_bytes
from moe_infinity.tools.doctor.line import Line, error, ok, warning

LITTLE_MEMORY = 2 << 30
NEARLY_FULL = 0.1  # of memory is free
OLDEST_GPU = (8, 0)  # whose code is tested: compute capability


def processor_line(name: str, features: Collection[str]) -> Line:
    for feature, called in (("avx512f", "AVX-512"), ("avx2", "AVX2"), ("neon", "NEON")):
        if feature in features:
            return ok("processor", f"{name}, {called}")
    hint = "use a processor with AVX2, AVX-512 or NEON: kernels are several times as fast there"
    return warning("processor", f"{name}, no AVX2, AVX-512 or NEON", hint)


def cores_line(usable: int, limit: float | None, threads: int, given: Mapping[str, str]) -> Line:
    """`threads` are those of torch, `given` the environment."""
    found = f"{usable} for this process, torch uses {threads}"
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if given.get(name) == "1" and usable > 1:
            return warning("cores", f"{found}, {name}=1", f"unset {name}")
    if limit is not None and threads > math.ceil(limit):
        hint = f"raise the container's limit, or set OMP_NUM_THREADS={math.ceil(limit)}"
        return warning("cores", f"{found}, the control group allows {limit:g}", hint)
    if threads > usable:
        hint = f"set OMP_NUM_THREADS={usable}: threads that share a core wait for each other"
        return warning("cores", found, hint)
    return ok("cores", found)


def memory_line(available: int, total: int) -> Line:
    found = f"{format_bytes(available)} free of {format_bytes(total)}"
    if available < LITTLE_MEMORY:
        return warning("memory", found, "end other programs, or give a small --host-memory")
    return ok("memory", found)


def swap_line(used: int, total: int, *, available: int, memory: int) -> Line:
    if not total:
        return ok("swap", "none")
    found = f"{format_bytes(used)} used of {format_bytes(total)}"
    if available < NEARLY_FULL * memory:
        hint = "free memory or lower --host-memory: experts in swap are slower than on the disk"
        return warning("swap", f"{found}, and memory is nearly full", hint)
    return ok("swap", found)


def group_line(limit: int | None, left: int, cores: float | None) -> Line:
    """Limits of a container."""
    parts = []
    if limit is not None:
        parts.append(f"{format_bytes(left)} free of {format_bytes(limit)}")
    if cores is not None:
        parts.append(f"{cores:g} cores")
    found = ", ".join(parts) or "no limit"
    if limit is not None and left < LITTLE_MEMORY:
        return warning("control group", found, "raise the memory limit of the container")
    return ok("control group", found)


def huge_pages_line(setting: str) -> Line:
    if setting == "never":
        hint = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        return warning("huge pages", "never", hint)
    return ok("huge pages", setting or "not on this system")


def memlock_line(limit: int | None, *, has_gpu: bool) -> Line:
    found = "no limit" if limit is None else format_bytes(limit)
    if has_gpu and limit is not None and limit < LITTLE_MEMORY:
        hint = "ulimit -l unlimited, or docker run --ulimit memlock=-1, if pages cannot be locked"
        return warning("memlock", found, hint)
    return ok("memlock", found if has_gpu else f"{found}, only of interest with a GPU")


def gpu_line(
    name: str | None, capability: tuple[int, int], memory: int, *, driver: str, build: str
) -> Line:
    """`name`: of the GPU that torch finds. `build`: the CUDA of torch's build, empty for none."""
    if name is None:
        if not driver:
            return ok("gpu", "none, experts compute on the CPU")
        if not build:
            hint = "install a torch that is built for CUDA"
            return warning("gpu", "a driver is there, torch is built without CUDA", hint)
        return warning(
            "gpu", f"a driver is there, torch (CUDA {build}) finds no GPU",
            "look at nvidia-smi: the driver may be too old for this torch",
        )  # fmt: skip
    found = f"{name}, {format_bytes(memory)}, capability {'.'.join(map(str, capability))}"
    if driver:
        found += f", {driver}"
    if capability < OLDEST_GPU:
        return warning(
            "gpu", found, "code is tested for capability 8.0 and newer: try device='cpu'"
        )
    return ok("gpu", found)


def launcher_line(compiler: str | None, cache: str, options: Collection[str]) -> Line:
    """Triton compiles a launcher for each kernel with a C compiler, and loads it from its cache."""
    if compiler is None:
        return error("launchers", "no C compiler", "install gcc or clang, or name one in CC")
    if "noexec" in options:
        hint = "name another folder in TRITON_CACHE_DIR"
        return error("launchers", f"{cache} is mounted noexec", hint)
    return ok("launchers", f"{compiler}, kept in {cache}")


def switches_lines(given: Mapping[str, str]) -> list[Line]:
    """Of the environment, where they break or slow what they are not meant for."""
    lines = []
    if given.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        lines.append(error("switches", "NUMBA_DISABLE_JIT is set", "unset NUMBA_DISABLE_JIT"))
    for name in ("TRITON_INTERPRET", "CUDA_LAUNCH_BLOCKING"):
        if given.get(name, "0") not in ("", "0"):
            lines.append(warning("switches", f"{name} is set, which is slow", f"unset {name}"))
    return lines or [ok("switches", "none that slow or break anything")]
