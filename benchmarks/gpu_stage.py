"""Runs the stages of gpu_check.py within a time limit and writes down each value as it comes.

Every stage has its own process: after an illegal access CUDA refuses all further calls of that
process, and a kernel that never ends can only be killed with its process.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import shutil
import signal
import statistics
import tempfile
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_models import Shape, write_checkpoint

from moe_infinity import MoE
from moe_infinity.gpu.engine import DeviceExperts
from tests.fake_cuda import FakeCudaDevice, RealClock, fake_device

FORK = multiprocessing.get_context("fork")  # modules are there, and nobody has asked CUDA yet
BEGUN = "begun"  # the first row of a stage
ENDED = "ended"  # the last one: seconds, or why there are none
REPEATED = ("machine", "write ", "a layer")  # stages that every run repeats, as they begin
LINK, MEMORY, PRODUCT, LOCKING = "link", "device memory", "matrix product", "page-locking"
END_S = 30.0  # of a process that is over or was killed: what it page-locked takes a while
# Where there is room first, for checkpoints: writing to disk takes minutes.
SCRATCH = Path("/dev/shm"), Path(tempfile.gettempdir())
WRITTEN_GBPS = 1.0  # of a checkpoint, at least


@dataclass(frozen=True)
class Stage:
    """Something to measure, and the seconds that it may take on a GPU."""

    name: str
    needs_s: float
    run: Callable[..., None]
    shape: Shape | None = None  # the model, whose folder `run` is given after the check


@dataclass(frozen=True)
class Bound:
    """The best value there may be, and what sets it."""

    by: str
    value: float


class Check:
    """Measured values, one row each, and the time that is left for further stages."""

    def __init__(
        self, file: Path, *, is_fake: bool = False, minutes: float = 9.5, is_resumed: bool = False
    ) -> None:
        """`is_resumed`: stages that ended well in `file` are not repeated; the rows of other stages
        stay until the stage runs again.
        """
        self._ends_at = time.perf_counter() + 60 * minutes
        self._file = file
        self._stage = ""
        self._parent = os.getpid()
        self.is_fake = is_fake
        self.device = "cpu" if is_fake else "cuda"
        self.warm_up, self.num_tokens = (2, 8) if is_fake else (8, 40)  # of a request
        if not is_resumed and file.exists():
            raise SystemExit(f"{file} has rows of an earlier run; --resume goes on with it")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        ended = [row for row in self.rows() if row["name"] == ENDED and row["unit"]]
        self._done = {row["stage"] for row in ended if not row["stage"].startswith(REPEATED)}

    # Rows

    def rows(self) -> list[dict[str, Any]]:
        """Of the last try of each stage. What a full disk has cut is left out."""
        found: list[dict[str, Any]] = []
        for line in self._file.read_text().splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                if row["name"] == BEGUN:
                    found = [other for other in found if other["stage"] != row["stage"]]
                found.append(row)
        return found

    def value(self, name: str, **conditions: object) -> Any:
        """The newest one of this name under these conditions; None if there is none."""
        wanted = {"name": name, **conditions}
        found = [row["value"] for row in self.rows() if wanted.items() <= row.items()]
        return found[-1] if found else None

    def add(
        self,
        name: str,
        value: float | bool | str,
        unit: str = "",
        bound: Bound | None = None,
        **conditions: object,
    ) -> None:
        """Write down a measured value, what bounds it in the same unit, and the conditions."""
        if os.getppid() != self._parent and os.getpid() != self._parent:
            raise SystemExit("whoever waited for this stage has gone")
        row: dict[str, Any] = {"stage": self._stage, "name": name, "value": value, "unit": unit}
        if isinstance(value, float):
            row |= {"bound": bound and bound.value, "bound_by": bound.by if bound else "itself"}
            if bound is not None and value > 0:
                is_time = unit in ("ms", "us", "s")
                row["of_bound"] = bound.value / value if is_time else value / bound.value
        row |= conditions
        row = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        line = "\n" + json.dumps(row)  # what a full disk has cut stays a line of its own
        told = [f"{key}={row[key]}" for key in [*row][4:] if row[key] is not None]
        print(f"{name:32}{row['value']!s:>12} {unit:8}", *told, flush=True)
        try:
            with self._file.open("a") as file:
                file.write(line)
        except OSError as error:
            print(f"{self._file} cannot be written: {error}", flush=True)

    def takes(self, num_bytes: float, *, by: str) -> Bound:
        """Milliseconds for these bytes at the rate that the machine had in this run."""
        return Bound(by, num_bytes / self.value(by, unit="GB/s") / 1e6)

    # Stages

    def run(self, stages: Sequence[Stage]) -> None:
        """One after the other, with the checkpoints that they need, as long as they need them."""
        name = f"gpu_check-{zlib.crc32(bytes(self._file.resolve())):08x}"
        places = [place for place in SCRATCH if place.is_dir()]
        for place in places:
            shutil.rmtree(place / name, ignore_errors=True)  # of a run that was killed
        shapes = {stage.shape for stage in stages if stage.shape is not None}
        needed = 1.2 * sum(shape.num_bytes for shape in shapes)
        has_room = (place for place in places if shutil.disk_usage(place).free > needed)
        scratch = next(has_room, places[-1]) / name
        try:
            for at, stage in enumerate(stages):
                self._run_with_checkpoint(stage, scratch)
                later = {s.shape for s in stages[at + 1 :] if s.name not in self._done}
                if stage.shape is not None and stage.shape not in later:
                    shutil.rmtree(scratch / stage.shape.folder, ignore_errors=True)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _run_with_checkpoint(self, stage: Stage, scratch: Path) -> None:
        if stage.name in self._done:
            return
        if stage.shape is None:
            self.stage(stage.name, stage.needs_s, partial(stage.run, self))
            return
        shape, folder = stage.shape, scratch / stage.shape.folder
        if not folder.is_dir():
            needs_s = 0.0 if shape.is_tiny else 5 + shape.num_bytes / WRITTEN_GBPS / 1e9
            writing = partial(write_checkpoint, folder, shape.config, self.device)
            self.stage(f"write {folder.name}", needs_s, writing)
        if folder.is_dir():
            self.stage(stage.name, stage.needs_s, partial(stage.run, self, folder, shape))
        else:
            self._leave_out(stage.name, "no checkpoint was written")

    def stage(self, name: str, needs_s: float, run: Callable[[], None]) -> None:
        """Run a stage unless it is done or would take too long."""
        left_s = self._ends_at - time.perf_counter()
        if name in self._done:
            return
        if needs_s > left_s:
            self._leave_out(name, "no time")
            return
        print(f"-- {name}", flush=True)
        self._stage = name
        self.add(BEGUN, name)
        process = FORK.Process(target=self._run_here, args=(run,), daemon=True)
        process.start()
        process.join(left_s if self.is_fake else min(left_s, 30 + 3 * needs_s))
        is_over = not process.is_alive()
        assert process.pid is not None
        with suppress(ProcessLookupError):  # and with it what it has started
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join(END_S)
        if self.value(ENDED, stage=name) is None:
            why = f"its process ended with {process.exitcode}" if is_over else "it took too long"
            self.add(ENDED, f"failed: {why}")

    def _run_here(self, run: Callable[[], None]) -> None:
        os.setpgid(0, 0)
        if self.is_fake:
            torch.set_num_threads(1)  # tiny tensors
        started = time.perf_counter()
        try:
            run()
        except Exception as error:
            traceback.print_exc()
            self.add(ENDED, f"failed: {type(error).__name__}: {error}"[:300])
        else:
            self.add(ENDED, time.perf_counter() - started, "s")

    def _leave_out(self, name: str, why: str) -> None:
        """Note why a stage did not run, unless an earlier run has values of it."""
        if not any(row["stage"] == name for row in self.rows()):
            self._stage = name
            self.add(ENDED, f"left out: {why}")

    # What stages share

    def has_graph(self, moe: MoE) -> bool:
        """Return True if the last step was a CUDA graph."""
        return isinstance(moe._experts, DeviceExperts) and moe._experts.graphed.has_graph

    @contextmanager
    def model(self, folder: Path, *, is_filled: bool = True, **options: Any) -> Iterator[MoE]:
        """A model on the GPU, or on a fake device, once its host memory is full."""
        gc.collect()  # what an earlier one leaves, on the device too
        fake = fake_device(FakeCudaDevice(clock=RealClock())) if self.is_fake else nullcontext()
        options = {"host_memory": "100%", **options}
        with fake, MoE(folder, device="auto" if self.is_fake else "cuda", **options) as moe:
            if is_filled:
                moe.preload()
            yield moe

    def seconds(self, run: Callable[[], Any], *, rounds: int = 5) -> float:
        """Median of `rounds` runs, after one to warm up."""
        times = []
        for _ in range(rounds + 1):
            started = time.perf_counter()
            run()
            if not self.is_fake:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])
