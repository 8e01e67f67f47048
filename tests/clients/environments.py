"""Each client in an environment of its own, made on first use, and run under limits."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VERSIONS = json.loads((HERE / "versions.json").read_text())
INSTALL_S = 1800
RESIDENT_BYTES = 4 << 30  # of a client and its children
LOOK_S = 0.2


@cache
def environment(name: str) -> Path | str:
    """The folder whose programs are this client's, installed once for each set of versions; or why
    that failed.
    """
    wanted = VERSIONS[name]
    digest = hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:12]
    folder = ROOT / ".clients" / f"{name}-{digest}"
    done = folder / ".installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            _install(wanted, folder)
        except subprocess.SubprocessError as error:
            return f"{name} cannot be installed: {error}"
        done.touch()
    return folder


def _install(wanted: dict[str, list[str]], folder: Path) -> None:
    if "npm" in wanted:
        (folder / "package.json").write_text('{"private": true}')
        quiet = ("--no-audit", "--no-fund", "--loglevel=error")
        commands = [["npm", "install", *quiet, *wanted["npm"]]]
    else:
        commands = [[sys.executable, "-m", "venv", "."]]
        commands += [["bin/pip", "install", "--quiet", *wanted["pip"]]]
    for command in commands:
        subprocess.run(command, cwd=folder, check=True, timeout=INSTALL_S, stdin=subprocess.DEVNULL)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a client ended."""

    code: int | None  # None: it was stopped
    out: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Client:
    """A client's programs, and a home and a working folder that are empty at the start."""

    environment: Path
    home: Path
    work: Path

    def _variables(self, more: Mapping[str, str]) -> dict[str, str]:
        programs = (self.environment / "node_modules" / ".bin", self.environment / "bin")
        path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
        own = {"HOME": str(self.home), "PATH": path, "LANG": "C.UTF-8", "TERM": "dumb"}
        return own | {"XDG_CONFIG_HOME": str(self.home / ".config")} | dict(more)

    def run(
        self,
        command: list[str],
        *,
        limit_s: float,
        stop_when: Callable[[], bool] = lambda: False,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Outcome:
        """Run it until it ends or, once `stop_when` holds, until Ctrl-C has ended it. Raises
        TimeoutError, MemoryError.
        """
        log = self.home / "output.txt"
        begin = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=self.work,
                env=self._variables(variables),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        was_stopped = False
        try:
            while process.poll() is None:
                said = log.read_text(errors="replace")[-2000:]
                if time.monotonic() - begin > limit_s:
                    raise TimeoutError(f"{command[0]} runs for more than {limit_s} s:\n{said}")
                if resident_bytes(process.pid) > RESIDENT_BYTES:
                    raise MemoryError(f"{command[0]} takes more than {RESIDENT_BYTES} bytes")
                if not was_stopped and stop_when():
                    was_stopped = True
                    os.killpg(process.pid, signal.SIGINT)
                    limit_s = min(limit_s, time.monotonic() - begin + 20)
                time.sleep(LOOK_S)
        except TimeoutError:
            if not was_stopped:  # some programs wait for a second Ctrl-C
                raise
        finally:
            self._end_all(process)
        code = None if was_stopped else process.returncode
        return Outcome(code, log.read_text(errors="replace"), time.monotonic() - begin)

    def _end_all(self, process: subprocess.Popen[bytes]) -> None:
        """End the program, and what it left in the background with this home."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        for other in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if other.environ().get("HOME") == str(self.home):
                    other.kill()


def resident_bytes(pid: int) -> int:
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += each.memory_info().rss
    return total
