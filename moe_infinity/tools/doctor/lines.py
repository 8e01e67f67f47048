"""The line of each check, as a function of what was seen, so that tests can make up machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from moe_infinity.sizes import format_bytes
from moe_infinity.tools.doctor.facts import Mount

NEWEST_TESTED = "3.14"  # Python
LOADED = ("torch", "numba", "transformers")  # an installation may be broken: they are imported
LITTLE_MEMORY = 2 << 30
NEARLY_FULL = 0.1  # of memory is free
OLDEST_GPU = (8, 0)  # whose code is tested: compute capability
NETWORK = ("nfs", "nfs4", "9p", "cifs", "smb3", "smbfs", "ceph", "glusterfs", "lustre", "afs")
IN_MEMORY = ("tmpfs", "ramfs")
LITTLE_ROOM = 20 << 30  # less than most models take
SLOW_DISK = 0.5e9  # bytes per second

State = Literal["ok", "warning", "error"]


class Line(NamedTuple):
    check: str
    state: State
    finding: str
    hint: str = ""  # what to do; empty if all is well


def ok(check: str, found: str) -> Line:
    return Line(check, "ok", found)


def warning(check: str, found: str, hint: str) -> Line:
    return Line(check, "warning", found, hint)


def error(check: str, found: str, hint: str) -> Line:
    return Line(check, "error", found, hint)


# Python and packages


def python_line(version: str, wanted: str, *, has_gil: bool) -> Line:
    found = Version(version)
    if found not in SpecifierSet(wanted):
        return error("python", f"{version}, needs {wanted}", f"install Python {wanted}")
    if not has_gil:
        hint = "use the ordinary build: the free-threaded one was never tried"
        return warning("python", f"{version}, free-threaded", hint)
    if found.release[:2] > Version(NEWEST_TESTED).release:
        hint = f"if packages are missing or fail, use Python {NEWEST_TESTED}"
        return warning("python", f"{version}, newer than what is tested", hint)
    return ok("python", version)


def package_lines(
    requirements: Sequence[str],
    version_of: Callable[[str], str | None],
    load: Callable[[str], object],
) -> Iterator[Line]:
    """`requirements` as in the package's metadata, without extras. `version_of` gives None for what
    is not installed, `load` raises if it cannot be imported.
    """
    for text in requirements:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            line = package_line(wanted, version_of(wanted.name))
            if line.state == "ok" and wanted.name in LOADED:
                line = loaded_line(line, load)
            yield line


def package_line(wanted: Requirement, version: str | None) -> Line:
    name = wanted.name
    hint = f"pip install '{name}{wanted.specifier}'"
    if version is None:
        return error(name, f"not installed, needs {wanted.specifier}", hint)
    try:
        fits = wanted.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return warning(name, f"{version}, which is no version", hint)
    if not fits:
        return error(name, f"{version}, needs {wanted.specifier}", hint)
    return ok(name, version)


def loaded_line(line: Line, load: Callable[[str], object]) -> Line:
    """The line of a package that is there, or that it cannot be imported."""
    try:
        load(line.check)
    except Exception as problem:  # whatever a broken installation gives
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
        package = f"{line.check}=={line.finding}"
        hint = f"install it again: pip install --force-reinstall --no-deps {package}"
        return error(line.check, f"{line.finding} cannot be imported: {reason}", hint)
    return line


def triton_line(version: str | None, wanted: str, *, has_gpu: bool) -> Line:
    """Only a GPU needs it."""
    if not has_gpu:
        return ok("triton", f"{version or 'not installed'}, not needed without a GPU")
    hint = f"pip install 'triton{wanted}'"
    if version is None:
        return warning("triton", "not installed: torch computes experts one by one", hint)
    if Version(version) not in SpecifierSet(wanted):
        return error("triton", f"{version}, needs {wanted}", hint)
    return ok("triton", version)


# Processor, memory, limits and GPU


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
    """Warn of variables of the environment that break or slow down a run."""
    lines = []
    if given.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        lines.append(error("switches", "NUMBA_DISABLE_JIT is set", "unset NUMBA_DISABLE_JIT"))
    for name in ("TRITON_INTERPRET", "CUDA_LAUNCH_BLOCKING"):
        if given.get(name, "0") not in ("", "0"):
            lines.append(warning("switches", f"{name} is set, which is slow", f"unset {name}"))
    return lines or [ok("switches", "none that slow or break anything")]


# Disks, and compiled kernels


def file_system_line(check: str, folder: Path, mount: Mount) -> Line:
    kind = mount.file_system
    found = f"{folder} on {mount.device or '?'} ({kind or 'unknown'})"
    if kind in NETWORK or kind.startswith("fuse.") or kind == "fuse":
        hint = "keep checkpoints on a local SSD: experts are read at random all the time"
        return warning(check, f"{found}, a network or user file system", hint)
    if kind in IN_MEMORY:
        hint = "keep checkpoints on a disk: their files take memory here, and experts take it again"
        return warning(check, f"{found}, which is memory", hint)
    return ok(check, found)


def room_line(free: int) -> Line:
    found = f"{format_bytes(free)} free"
    if free < LITTLE_ROOM:
        hint = "set HF_HOME to a folder on a larger disk before you download a model"
        return warning("disk space", found, hint)
    return ok("disk space", found)


def direct_line(is_there: bool | None) -> Line:
    """Say if a file was read past the page cache; None: no file could be written to try it."""
    if is_there is None:
        return warning("direct reads", "not tried", "make the cache folder writable")
    if not is_there:
        hint = "keep checkpoints on ext4, xfs or btrfs: reads through the page cache cost more CPU"
        return warning("direct reads", "refused here, the page cache is used", hint)
    return ok("direct reads", "past the page cache")


def page_cache_line(is_told: bool | None) -> Line:
    """Say if the system tells what it caches of a file; None: no file could be written."""
    if is_told is None:
        return warning("page cache", "not tried", "make the cache folder writable")
    if not is_told:
        hint = (
            "Linux 6.5 or newer tells it, of files that you own: what is cached is read again else"
        )
        return warning("page cache", "the system does not tell what it has of a file", hint)
    return ok("page cache", "the system tells what it has of a file")


def rate_line(rate: float) -> Line:
    found = f"{rate / 1e9:.2f} GB/s in random reads"
    if rate < SLOW_DISK:
        hint = "set HF_HOME to a folder on a local SSD: each missed expert waits for this disk"
        return warning("disk rate", found, hint)
    return ok("disk rate", found)


def kernels_line(folder: Path, num_kernels: int, num_bytes: int, *, is_writable: bool) -> Line:
    """Count the kernels that this version of the package has compiled on this processor."""
    if not is_writable:
        return warning(
            "kernels", f"{folder} cannot be written, {num_kernels} are there: the others are "
            "compiled at each start",
            "make it writable, or name another cache folder in XDG_CACHE_HOME",
        )  # fmt: skip
    if not num_kernels:
        return ok("kernels", f"none compiled yet: the first start takes seconds longer ({folder})")
    return ok("kernels", f"{num_kernels} compiled, {format_bytes(num_bytes)} in {folder}")
