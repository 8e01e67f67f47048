"""Looks at this machine, and asks for a line about each thing. Nothing here imports torch before a
check needs it, and a check that fails is a line, too.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from moe_infinity.system import linux, machine, process_limits
from moe_infinity.system.files import is_known, nearest_folder, open_past_cache, open_to_read
from moe_infinity.system.linux import is_cached
from moe_infinity.system.machine import available_memory_bytes, machine_memory_bytes
from moe_infinity.system.memory import zeroed_memory
from moe_infinity.tools.doctor import facts, lines
from moe_infinity.tools.doctor.lines import Line, error, warning

PACKAGE = "moe-infinity"
TRITON = ">=3.4"  # of the GPU's kernels; only the extra dev installs it
BLOCK = 4096
PREFIX = ".moe-infinity-doctor-"
Check = Callable[[], Line | Iterable[Line]]


def examine(*, is_quick: bool = False) -> Iterator[Line]:
    """The lines, one by one as they are found. Quick: without the seconds that a disk needs."""
    cache = hub_cache()
    checks: list[tuple[str, Check]] = [
        ("python", _python),
        ("packages", _packages),
        ("processor", _processor),
        ("cores", _cores),
        ("memory", lambda: lines.memory_line(available_memory_bytes(), machine_memory_bytes())),
        ("swap", _swap),
        ("control group", _group),
        ("huge pages", lambda: lines.huge_pages_line(facts.huge_pages_setting())),
        ("gpu", _gpu),
        ("switches", lambda: lines.switches_lines(os.environ)),
        ("kernels", _kernels),
        (
            "hub cache",
            lambda: lines.file_system_line("hub cache", cache, facts.mount_of(cache)),
        ),
        ("this folder", _this_folder),
        ("disk space", lambda: lines.room_line(shutil.disk_usage(nearest_folder(cache)).free)),
        ("direct reads", lambda: _tried(nearest_folder(cache))),
    ]
    if not is_quick:
        checks.append(("disk rate", partial(_rate, nearest_folder(cache))))
    for name, check in checks:
        yield from lines_of(name, check)


def lines_of(name: str, check: Check) -> Iterator[Line]:
    """Yield what a check says, or that it failed."""
    try:
        found = check()
        yield from [found] if isinstance(found, Line) else found
    except Exception as problem:  # a broken package may raise anything
        reason = (str(problem).splitlines() or [""])[0]
        what = f"could not be looked at: {type(problem).__name__}: {reason}"
        yield error(name, what, "mend what is named here, then run doctor again")


def hub_cache() -> Path:
    """The folder of checkpoints that were downloaded."""
    try:
        from huggingface_hub import constants
    except ImportError:  # another line says so
        return Path.home() / ".cache" / "huggingface" / "hub"
    return Path(constants.HF_HUB_CACHE)


# Packages


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Line:
    wanted = str(metadata.metadata(PACKAGE)["Requires-Python"])
    has_gil = not sysconfig.get_config_var("Py_GIL_DISABLED")
    return lines.python_line(platform.python_version(), wanted, has_gil=has_gil)


def _packages() -> Iterator[Line]:
    requirements = metadata.requires(PACKAGE) or []
    return lines.package_lines(requirements, version_of, importlib.import_module)


# Hardware


def _processor() -> Line:
    from llvmlite import binding as llvm

    found = llvm.get_host_cpu_features()
    features_of = {name for name, is_there in found.items() if is_there}
    return lines.processor_line(llvm.get_host_cpu_name(), features_of)


def _cores() -> Line:
    import torch

    limit = machine.core_limit()
    return lines.cores_line(machine.num_cores(), limit, torch.get_num_threads(), os.environ)


def _swap() -> Line:
    swap = psutil.swap_memory()
    return lines.swap_line(
        int(swap.used),
        int(swap.total),
        available=available_memory_bytes(),
        memory=machine_memory_bytes(),
    )


def _group() -> Line:
    limits = machine.memory_limits()
    limit = min((found.num_bytes for found in limits), default=None)
    left = min((found.num_bytes - found.used_bytes for found in limits), default=0)
    return lines.group_line(limit, left, machine.core_limit())


def _gpu() -> Iterator[Line]:
    import torch

    build = torch.version.cuda or ""
    driver = facts.nvidia_driver()
    has_gpu = torch.cuda.is_available()
    name = None
    capability = (0, 0)
    memory = 0
    if has_gpu:
        found: Any = torch.cuda.get_device_properties(0)
        name = found.name
        capability = (found.major, found.minor)
        memory = found.total_memory
    yield lines.gpu_line(name, capability, memory, driver=driver, build=build)
    yield lines.triton_line(version_of("triton"), TRITON, has_gpu=has_gpu)
    yield lines.memlock_line(process_limits.lockable_bytes(), has_gpu=has_gpu)
    if has_gpu:
        cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
        compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
        compiler = next((path for c in compilers if c and (path := shutil.which(c))), None)
        options = facts.mount_of(nearest_folder(cache).resolve()).options
        yield lines.launcher_line(compiler, str(cache), options)


# Disks


def _kernels() -> Line:
    from moe_infinity.kernels.cpu.compiler import place_of_kernels

    folder = place_of_kernels()
    files = list(folder.glob("*/*.nbc"))
    num_bytes = sum(file.stat().st_size for file in files)
    is_writable = is_known(folder) and os.access(nearest_folder(folder), os.W_OK | os.X_OK)
    return lines.kernels_line(folder, len(files), num_bytes, is_writable=is_writable)


def _this_folder() -> Line:
    here = Path.cwd()
    return lines.file_system_line("this folder", here, facts.mount_of(here))


def _tried(folder: Path) -> Iterator[Line]:
    """With a temporary file of one block."""
    is_direct: bool | None = None
    is_told: bool | None = None
    with suppress(OSError), tempfile.TemporaryDirectory(dir=folder, prefix=PREFIX) as name:
        file = Path(name) / "block"
        file.write_bytes(bytes(BLOCK))
        is_direct = _is_read_directly(file)
        is_told = _is_told(file)
    yield lines.direct_line(is_direct)
    yield lines.page_cache_line(is_told)


def _is_read_directly(file: Path) -> bool:
    opened = open_past_cache(file)
    if opened is None:
        return False
    try:
        return opened.read([memoryview(zeroed_memory(BLOCK))], 0) == BLOCK
    except OSError:
        return False
    finally:
        opened.close()


def _is_told(file: Path) -> bool:
    if not linux.is_linux():
        return False
    opened = open_to_read(file)
    try:
        is_cached(opened.descriptor, 0, BLOCK)
    except OSError:
        return False
    finally:
        opened.close()
    return True


def _rate(folder: Path) -> Line:
    from moe_infinity.errors import CheckpointError
    from moe_infinity.tools.planning.disk import measure_disk

    try:
        return lines.rate_line(measure_disk(folder))
    except CheckpointError as problem:
        found, _, hint = str(problem).partition("\nhint: ")
        return warning("disk rate", f"not measured: {found}", hint or "look at this folder")
