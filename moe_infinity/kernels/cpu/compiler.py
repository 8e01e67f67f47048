"""Compiles the kernels of the CPU, and keeps what was compiled on disk for the next start.

A folder in the user's cache has the kernels of one state of this package, one version of numba and
one kind of processor. numba writes each file under another name first and then renames it, and a
file holds one kernel: so several processes may compile at once. A damaged file is replaced. numba's
files are pickles, which run code when they are read: a folder is used only if nobody else can
have written to it. Otherwise, and where nothing can be written, kernels are compiled at each start,
and a warning says so once.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import RLock
from typing import Any

import llvmlite
import numba
import platformdirs
from llvmlite import binding as llvm
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_infinity.system.files import is_known, make_private_folder

PACKAGE = Path(__file__).resolve().parents[2]
UNUSED_S = 30 * 24 * 3600  # a folder of another version that was not used for so long is deleted

logger = logging.getLogger(__name__)
_lock = RLock()  # numba has one cache folder for all threads


def machine_code(signature: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a function of addresses and integers that runs without the GIL."""
    return lambda function: _compiled(njit, function, signature, nogil=True)


def c_function(
    signature: Any, name: str, *, is_kept: bool = True
) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: a function whose `address` other machine code calls. Names must differ. Keep only
    what depends on nothing but this package.
    """

    def compile_named(function: Callable[..., Any]) -> Any:
        function.__name__ = function.__qualname__ = name  # the name of its file
        if is_kept:
            return _compiled(cfunc, function, signature)
        return cfunc(signature)(function)

    return compile_named


def named(kind: Any) -> Any:
    """numba's type of a NamedTuple of integers."""
    return types.NamedUniTuple(types.int64, len(kind._fields), kind)


def reader_of(kind: Any) -> Any:
    """For numba: a function that reads a NamedTuple of integers from an address."""

    @intrinsic  # type: ignore[untyped-decorator]
    def read(_: Any, address: Any) -> Any:
        def emit(context: Any, b: Any, _: Any, args: Any) -> Any:
            at = b.inttoptr(args[0], ir.IntType(64).as_pointer())
            values = [b.load(b.gep(at, [ir.IntType(64)(k)])) for k in range(len(kind._fields))]
            return cgutils.pack_array(b, values)

        return named(kind)(types.int64), emit

    return read


def _compiled(compile_: Any, function: Any, signature: Any, **options: Any) -> Any:
    with _lock:
        folder = cache_folder()
        if folder is not None:
            try:
                return _kept(folder, compile_, function, signature, **options)
            except Exception as error:  # a full disk, say
                _warn(folder, error)
        return compile_(signature, **options)(function)


def _kept(folder: Path, compile_: Any, function: Any, signature: Any, **options: Any) -> Any:
    """The compiled function, loaded from the folder, or compiled and written there."""
    stock_folder = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    keeping = compile_(signature, cache=True, **options)
    try:
        return keeping(function)
    except OSError:
        raise
    except Exception as error:  # whatever pickle makes of a damaged file
        logger.info("%s: %r of %s", folder, error, function.__qualname__)
        name = function.__qualname__.replace("<", "").replace(">", "")  # as in numba's file names
        for file in folder.glob(f"*/*.{name}-*"):
            file.unlink(missing_ok=True)
        return keeping(function)
    finally:
        numba.config.CACHE_DIR = stock_folder


@cache
def cache_folder() -> Path | None:
    """The folder of compiled kernels; None if nothing can be written there."""
    folder = place_of_kernels()
    try:
        if not is_known(folder):
            raise FileNotFoundError("this user has no home folder")
        is_first_start = not folder.exists()
        make_private_folder(folder, num_own=3)
        (folder / "last-use").touch(mode=0o600)
        if is_first_start:
            logger.warning("compiling kernels (once): later starts find them in %s", folder)
        _delete_unused(folder.parent)
    except OSError as error:
        _warn(folder, error)
        return None
    return folder


def place_of_kernels() -> Path:
    """The folder for what this state of the package compiles on this processor, which begins with
    "~" if the user has no home folder.
    """
    cache_of_user = Path("~/.cache/moe-infinity")
    with suppress(RuntimeError):  # there is no home folder; older versions return that path
        cache_of_user = platformdirs.user_cache_path("moe-infinity")
    return cache_of_user / "kernels" / _version()


def _version() -> str:
    """A hash of all that machine code depends on."""
    digest = hashlib.sha256()
    for text in (numba.__version__, llvmlite.__version__, *processor()):
        digest.update(text.encode())
    for file in sorted(PACKAGE.glob("kernels/**/*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def processor() -> tuple[str, str]:
    """The name and the features of the processor that code is compiled for: this machine's, unless
    NUMBA_CPU_NAME and NUMBA_CPU_FEATURES name another.
    """
    name = numba.config.CPU_NAME
    features = numba.config.CPU_FEATURES
    if features is None:
        features = llvm.get_host_cpu_features().flatten() if name is None else ""
    return name or llvm.get_host_cpu_name(), features


def has_avx512() -> bool:
    """True if that processor has 32 registers of 16 float32 values."""
    return "+avx512f" in processor()[1].split(",")


@cache  # it takes 0.2 ms to ask, and each product of a prompt asks
def multiplies_bfloat16() -> bool:
    """True if that processor multiplies pairs of bfloat16 (AVX512-BF16)."""
    return "+avx512bf16" in processor()[1].split(",")


@cache
def multiplies_bytes() -> bool:
    """True if that processor adds products of four bytes with four others (AVX512-VNNI)."""
    return "+avx512vnni" in processor()[1].split(",")


@cache
def permutes_bytes() -> bool:
    """True if that processor permutes the bytes of a vector of 64 (AVX512-VBMI)."""
    return "+avx512vbmi" in processor()[1].split(",")


def _delete_unused(folder: Path) -> None:
    for mark in folder.glob("*/last-use"):
        with suppress(FileNotFoundError):  # another process deletes it, too
            if time.time() - mark.stat().st_mtime > UNUSED_S:
                shutil.rmtree(mark.parent, ignore_errors=True)


@cache
def _warn_once(folder: Path, reason: str) -> None:
    logger.warning(
        "%s: compiled kernels cannot be kept, so each start compiles them: %s\n"
        "hint: XDG_CACHE_HOME may name a folder of yours", folder, reason,
    )  # fmt: skip


def _warn(folder: Path, error: Exception) -> None:
    _warn_once(folder, str(error))
