"""Runs the stages of gpu_check.py within a time limit and writes down each value as it comes.

Every stage has its own process: after an illegal access CUDA refuses all further calls of that
process, and a kernel that never ends can only be killed with its process.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from moe_infinity import MoE
from tests.cuda.fake_cuda import FakeCudaDevice, RealClock, fake_device

FORK = multiprocessing.get_context("fork")  # modules are there, and nobody has asked CUDA yet
FAKE_LIMIT_S = 600.0
OVERTIME_S = 45.0  # of the last stage, if its time was estimated wrongly
ENDED = "stage"  # the last row of one: seconds, or why there are none
END_S = 30.0  # of a process that is over or was killed: what it page-locked takes a while


def has_gpu() -> bool:
    """Whether torch finds a CUDA device. Another process looks: one that has initialized CUDA
    cannot be forked.
    """
    process = FORK.Process(target=_end_with_0_if_there_is_one)
    process.start()
    process.join(END_S)
    return process.exitcode == 0


def _end_with_0_if_there_is_one() -> None:
    raise SystemExit(0 if torch.cuda.is_available() else 1)


def stages_done(rows: list[dict[str, Any]]) -> set[str]:
    """Names of the stages that ended well, without those that every machine has to repeat."""
    is_over = [row for row in rows if row["name"] == ENDED and isinstance(row["value"], float)]
    done = {row["stage"] for row in is_over} - {"machine", "link"}
    return {name for name in done if not name.endswith(": write")}


@dataclass
class Found:
    """Results of one stage that later stages need."""

    h2d_gbps: float | None = None
    resident_tokens: dict[str, list[int]] = field(default_factory=dict)  # by shape


class Check:
    """Measured values, one row each, and the time that is left for further stages."""

    def __init__(
        self,
        out: Path,
        traces: Path,
        *,
        is_fake: bool,
        minutes: float,
        whole: str | None = None,
        resumed: Path | None = None,
    ) -> None:
        """`resumed` is the file that an earlier run of the same kind wrote. Stages that ended well
        in it are not repeated; the rows of other stages stay until the stage runs again.
        """
        self.is_fake, self.traces = is_fake, traces
        self._kind = {"is_fake": is_fake, "whole": whole}
        self.rows: list[dict[str, Any]] = []
        self.found = Found()
        if resumed is not None:
            earlier = json.loads(resumed.read_text())
            if earlier["kind"] != self._kind:
                raise SystemExit(f"{resumed} has another kind of run: {earlier['kind']}")
            self.rows = earlier["rows"]
            self.found.resident_tokens = earlier["resident_tokens"]
        self._done = stages_done(self.rows)
        self._stage = ""
        self._tell: Connection | None = None  # whoever waits for this stage
        self._file = out / "gpu_check.json"
        self._ends_at = time.perf_counter() + 60 * minutes
        out.mkdir(parents=True, exist_ok=True)

    @property
    def device(self) -> str:
        return "cpu" if self.is_fake else "cuda"

    @property
    def num_checked(self) -> int:
        """Tokens of a tiny model after a prompt of 48: a window of 64 fills up."""
        return 24 if self.is_fake else 48

    def add(
        self, name: str, value: float | bool | str, unit: str = "", **more: float | str | None
    ) -> None:
        """Write down a measured value. `more` may have the best possible value as `ceiling`, in the
        same unit, and the conditions.
        """
        row: dict[str, Any] = {"stage": self._stage, "name": name, "value": value, "unit": unit}
        row |= more
        ceiling = more.get("ceiling")
        if isinstance(ceiling, float) and isinstance(value, float) and value > 0:
            row["of_ceiling"] = ceiling / value if unit == "ms" else value / ceiling
        row = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        json.dumps(row)  # here, where it is this stage that fails
        self.rows.append(row)
        if self._tell is None:
            self.write()
        else:
            self._tell.send(row)
        print("  ".join(f"{key}={row[key]}" for key in list(row)[1:]), flush=True)

    def link_ms(self, megabytes: float) -> float:
        """Milliseconds that a copy to the GPU takes at the bandwidth that was measured first."""
        assert self.found.h2d_gbps is not None
        return megabytes / self.found.h2d_gbps

    def is_done(self, name: str) -> bool:
        """Whether an earlier run ended this stage well."""
        return name in self._done

    def stage(self, name: str, needs_s: float, run: Callable[[], None]) -> None:
        """Run a stage unless it is done or would take too long; keep what is known so far."""
        if self.is_done(name):
            return
        started = time.perf_counter()
        if started + needs_s > self._ends_at:
            self.leave_out(name, "no time")
            return
        print(f"-- {name}", flush=True)
        self._stage, self.rows = name, [row for row in self.rows if row["stage"] != name]
        limit_s = min(30 + 3 * needs_s, self._ends_at + OVERTIME_S - started)
        failed = self._run_apart(run, FAKE_LIMIT_S if self.is_fake else limit_s)
        if failed is not None:
            self.add(ENDED, f"failed: {failed}"[:300])
        else:
            self.add(ENDED, time.perf_counter() - started, "s")

    def leave_out(self, name: str, why: str) -> None:
        """Note why a stage did not run, unless an earlier run has values of it."""
        if not any(row["stage"] == name for row in self.rows):
            self._stage = name
            self.add(ENDED, f"left out: {why}")

    def _run_apart(self, run: Callable[[], None], limit_s: float) -> str | None:
        """Run a stage in a process and add its rows. Returns what went wrong, or None."""
        listen, tell = FORK.Pipe(duplex=False)
        process = FORK.Process(target=self._run_here, args=(run, tell), daemon=True)
        process.start()
        tell.close()
        try:
            failed = self._receive(listen, process.is_alive, limit_s)
        except (EOFError, OSError):  # in the middle of a row
            process.join(END_S)
            failed = f"its process ended with {process.exitcode}"
        if failed is None:
            process.join(END_S)  # what it had is free for the next one then
        process.kill()
        process.join(END_S)
        return failed

    def _receive(
        self, listen: Connection, is_alive: Callable[[], bool], limit_s: float
    ) -> str | None:
        """Add the rows that a process sends until it has ended. Raises EOFError if it died; a child
        of that process may still hold the pipe open.
        """
        ends_at = time.perf_counter() + limit_s
        while (left_s := ends_at - time.perf_counter()) > 0:
            was_alive = is_alive()
            if not listen.poll(min(left_s, 1.0)):
                if was_alive:
                    continue
                raise EOFError
            told = listen.recv()
            if isinstance(told, tuple):
                self.found, failed = told
                return None if failed is None else str(failed)
            self.rows.append(told)
            self.write()
        return f"not over after {limit_s:.0f} s"

    def _run_here(self, run: Callable[[], None], tell: Connection) -> None:
        self._tell, failed = tell, None
        try:
            run()
        except Exception as error:
            traceback.print_exc()
            failed = f"{type(error).__name__}: {error}"
        tell.send((self.found, failed))

    def write(self) -> None:
        """Write the rows to a new file that replaces the old one. A full disk or the end of this
        process leaves the old one as it was.
        """
        told = {"kind": self._kind, "resident_tokens": self.found.resident_tokens}
        text = json.dumps(told | {"rows": self.rows}, indent=1) + "\n"
        unfinished = self._file.with_suffix(".tmp")
        try:
            unfinished.write_text(text)
            unfinished.replace(self._file)
        except OSError as error:
            print(f"{self._file} cannot be written: {error}", flush=True)

    @contextmanager
    def model(self, folder: Path, **options: Any) -> Iterator[MoE]:
        """A model on the GPU, or on a fake device."""
        gc.collect()  # what an earlier one leaves, on the device too
        fake = fake_device(FakeCudaDevice(clock=RealClock())) if self.is_fake else nullcontext()
        with fake, MoE(folder, device="auto" if self.is_fake else "cuda", **options) as moe:
            yield moe

    def synchronize(self) -> None:
        if not self.is_fake:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], *, rounds: int = 5) -> float:
        """Median of `rounds` runs, after one to warm up."""
        times = []
        for _ in range(rounds + 1):
            self.synchronize()
            started = time.perf_counter()
            run()
            self.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])
