"""Every outcome of every check, on machines that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_infinity.tools.doctor import lines
from moe_infinity.tools.doctor.facts import Mount
from moe_infinity.tools.doctor.lines import Line

GIB = 1 << 30
HERE = Path("/models")


def python(version: str, *, has_gil: bool = True) -> Line:
    return lines.python_line(version, ">=3.10", has_gil=has_gil)


def package(version: str | None, *, problem: Exception | None = None) -> Line:
    """Of torch, as installed."""

    def load(name: str) -> None:
        if problem is not None:
            raise problem

    texts = ["torch<3,>=2.8", 'fastapi>=1; extra == "serve"']
    (line,) = lines.package_lines(texts, lambda name: version, load)
    return line


def triton(version: str | None, *, has_gpu: bool) -> Line:
    return lines.triton_line(version, ">=3.4", has_gpu=has_gpu)


def processor(*features: str) -> Line:
    return lines.processor_line("a processor", features)


def cores(usable: int, limit: float | None, threads: int, **given: str) -> Line:
    return lines.cores_line(usable, limit, threads, given)


def swap(used: int, total: int, available: int) -> Line:
    return lines.swap_line(used, total, available=available, memory=16 * GIB)


def gpu(name: str | None, capability: tuple[int, int], driver: str, build: str) -> Line:
    return lines.gpu_line(name, capability, 24 * GIB, driver=driver, build=build)


def memlock(limit: int | None, *, has_gpu: bool) -> Line:
    return lines.memlock_line(limit, has_gpu=has_gpu)


def launcher(compiler: str | None, *options: str) -> Line:
    return lines.launcher_line(compiler, "/home/me/.triton/cache", options)


def on(kind: str) -> Line:
    return lines.file_system_line("hub cache", HERE, Mount("/dev/sda", kind, ("rw",)))


def kernels(num: int, *, is_writable: bool) -> Line:
    return lines.kernels_line(HERE, num, 3 << 20, is_writable=is_writable)


def switch(**given: str) -> Line:
    (line,) = lines.switches_lines(given)
    return line


OUTCOMES: dict[str, tuple[Line, str, str, str]] = {
    # what was seen: (line, state, a part of what is said, a part of the hint)
    "python": (python("3.11.7"), "ok", "3.11.7", ""),
    "an old python": (python("3.9.1"), "error", "needs >=3.10", "install Python"),
    "a new python": (python("3.15.0"), "warning", "newer than what is tested", "use Python 3.14"),
    "no gil": (python("3.13.1", has_gil=False), "warning", "free-threaded", "ordinary build"),
    "a package": (package("2.13.0+cpu"), "ok", "2.13.0+cpu", ""),
    "an old package": (package("2.6.0"), "error", "2.6.0, needs <3,>=2.8", "pip install 'torch"),
    "no package": (package(None), "error", "not installed", "pip install 'torch<3,>=2.8'"),
    "a strange version": (package("main"), "warning", "no version", "pip install"),
    "a broken package": (
        package("2.9", problem=OSError("libcudart.so.13: no such file\nmore")),
        "error", "2.9 cannot be imported: libcudart.so.13: no such file", "torch==2.9",
    ),
    "triton on a cpu": (triton(None, has_gpu=False), "ok", "not needed", ""),
    "triton": (triton("3.7.1", has_gpu=True), "ok", "3.7.1", ""),
    "no triton": (triton(None, has_gpu=True), "warning", "not installed", "pip install"),
    "an old triton": (triton("3.1", has_gpu=True), "error", "needs >=3.4", "pip install"),
    "avx512": (processor("avx2", "avx512f"), "ok", "AVX-512", ""),
    "avx2": (processor("avx2"), "ok", "AVX2", ""),
    "neon": (processor("neon"), "ok", "NEON", ""),
    "an old processor": (processor("sse2"), "warning", "no AVX2", "several times as fast"),
    "cores": (cores(8, None, 8), "ok", "8 for this process", ""),
    "one thread": (
        cores(8, None, 1, OMP_NUM_THREADS="1"), "warning", "OMP_NUM_THREADS=1", "unset OMP",
    ),
    "one thread of one core": (cores(1, None, 1, OMP_NUM_THREADS="1"), "ok", "1 for", ""),
    "a limit of cores": (cores(8, 1.5, 8), "warning", "allows 1.5", "OMP_NUM_THREADS=2"),
    "enough cores": (cores(8, 8.0, 8), "ok", "torch uses 8", ""),
    "more threads than cores": (cores(2, None, 8), "warning", "torch uses 8", "OMP_NUM_THREADS=2"),
    "memory": (lines.memory_line(9 * GIB, 16 * GIB), "ok", "9.0 GiB free of 16.0 GiB", ""),
    "no memory": (lines.memory_line(GIB, 16 * GIB), "warning", "1.0 GiB", "--host-memory"),
    "no swap": (swap(0, 0, GIB), "ok", "none", ""),
    "swap": (swap(GIB, 2 * GIB, 8 * GIB), "ok", "1.0 GiB used of 2.0 GiB", ""),
    "swap and no memory": (swap(GIB, 2 * GIB, GIB), "warning", "nearly full", "slower than"),
    "no group": (lines.group_line(None, 0, None), "ok", "no limit", ""),
    "a group": (
        lines.group_line(8 * GIB, 4 * GIB, 2.0), "ok", "4.0 GiB free of 8.0 GiB, 2 cores", "",
    ),
    "a full group": (lines.group_line(8 * GIB, GIB, None), "warning", "1.0 GiB", "raise"),
    "huge pages": (lines.huge_pages_line("madvise"), "ok", "madvise", ""),
    "no such setting": (lines.huge_pages_line(""), "ok", "not on this system", ""),
    "no huge pages": (lines.huge_pages_line("never"), "warning", "never", "echo madvise"),
    "memlock on a cpu": (memlock(8192, has_gpu=False), "ok", "only of interest with a GPU", ""),
    "memlock": (memlock(8192, has_gpu=True), "warning", "8.0 KiB", "ulimit -l"),
    "no memlock": (memlock(None, has_gpu=True), "ok", "no limit", ""),
    "no gpu": (gpu(None, (0, 0), "", ""), "ok", "on the CPU", ""),
    "no cuda": (gpu(None, (0, 0), "NVRM 570", ""), "warning", "without CUDA", "built for CUDA"),
    "no driver": (gpu(None, (0, 0), "NVRM 570", "13.0"), "warning", "finds no GPU", "nvidia-smi"),
    "a gpu": (gpu("H100", (9, 0), "NVRM 570", "13.0"), "ok", "H100, 24.0 GiB, capability 9.0", ""),
    "an old gpu": (gpu("T4", (7, 5), "", "13.0"), "warning", "capability 7.5", "device='cpu'"),
    "a launcher": (launcher("/usr/bin/gcc", "rw"), "ok", "/usr/bin/gcc", ""),
    "no compiler": (launcher(None), "error", "no C compiler", "install gcc"),
    "noexec": (launcher("gcc", "rw", "noexec"), "error", "noexec", "TRITON_CACHE_DIR"),
    "no switch": (switch(TRITON_INTERPRET="0"), "ok", "none", ""),
    "no jit": (switch(NUMBA_DISABLE_JIT="1"), "error", "NUMBA_DISABLE_JIT", "unset"),
    "interpreted": (switch(TRITON_INTERPRET="1"), "warning", "TRITON_INTERPRET", "unset"),
    "ext4": (on("ext4"), "ok", "/models on /dev/sda (ext4)", ""),
    "nfs": (on("nfs4"), "warning", "network", "local SSD"),
    "fuse": (on("fuse.sshfs"), "warning", "network", "local SSD"),
    "tmpfs": (on("tmpfs"), "warning", "which is memory", "keep checkpoints on a disk"),
    "an unknown file system": (on(""), "ok", "unknown", ""),
    "room": (lines.room_line(90 * GIB), "ok", "90.0 GiB free", ""),
    "no room": (lines.room_line(GIB), "warning", "1.0 GiB free", "HF_HOME"),
    "direct": (lines.direct_line(True), "ok", "past the page cache", ""),
    "not direct": (lines.direct_line(False), "warning", "refused", "ext4"),
    "direct, not tried": (lines.direct_line(None), "warning", "not tried", "writable"),
    "told": (lines.page_cache_line(True), "ok", "tells", ""),
    "not told": (lines.page_cache_line(False), "warning", "does not tell", "Linux 6.5"),
    "told, not tried": (lines.page_cache_line(None), "warning", "not tried", "writable"),
    "a disk": (lines.rate_line(3e9), "ok", "3.00 GB/s", ""),
    "a slow disk": (lines.rate_line(1.5e8), "warning", "0.15 GB/s", "local SSD"),
    "kernels": (kernels(40, is_writable=True), "ok", "40 compiled, 3.0 MiB in /models", ""),
    "no kernels": (kernels(0, is_writable=True), "ok", "none compiled yet", ""),
    "no place for kernels": (kernels(0, is_writable=False), "warning", "each start", "XDG_CACHE"),
}  # fmt: skip


@pytest.mark.parametrize("seen", OUTCOMES)
def test_what_is_seen_is_said(seen):
    line, state, found, hint = OUTCOMES[seen]
    assert line.state == state
    assert found in line.finding
    assert hint in line.hint


def test_whatever_is_not_well_comes_with_what_to_do():
    for seen, (line, *_) in OUTCOMES.items():
        assert bool(line.hint) == (line.state != "ok"), seen


def test_every_switch_is_said():
    said = lines.switches_lines({"NUMBA_DISABLE_JIT": "1", "CUDA_LAUNCH_BLOCKING": "1"})
    assert [line.state for line in said] == ["error", "warning"]
