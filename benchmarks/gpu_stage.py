"""The rows of gpu_check.py as they come, and the time that is left for more."""

from __future__ import annotations

import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from fake_link import FakeLink, RealClock, fake_device

from moe_infinity import MoE


class Check:
    """Rows, and the time that is left for more."""

    def __init__(self, out: Path, *, is_fake: bool, minutes: float) -> None:
        self.is_fake = is_fake
        self.rows: list[dict[str, Any]] = []
        self.h2d_gbps: float | None = None
        self.resident_tokens: dict[str, list[int]] = {}  # by shape: with all experts on the device
        self._out = out
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
        """A measured value; `ceiling` in the same unit, and the conditions."""
        row: dict[str, Any] = {"name": name, "value": value, "unit": unit, **more}
        ceiling = more.get("ceiling")
        if isinstance(ceiling, float) and isinstance(value, float) and value > 0:
            row["of_ceiling"] = ceiling / value if unit == "ms" else value / ceiling
        row = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        self.rows.append(row)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)

    def stage(self, name: str, needs_s: float, run: Callable[[], None]) -> None:
        """Run it, if it will be over in time; keep what is known so far."""
        started = time.perf_counter()
        if started + needs_s > self._ends_at:
            self.add(name, "left out: no time")
        else:
            print(f"-- {name}", flush=True)
            try:
                run()
            except Exception as error:
                traceback.print_exc()
                self.add(name, f"failed: {type(error).__name__}: {error}"[:300])
            self.add(f"{name}: stage", time.perf_counter() - started, "s")
        (self._out / "gpu_check.json").write_text(json.dumps(self.rows, indent=1) + "\n")

    @contextmanager
    def model(self, folder: Path, **options: Any) -> Iterator[MoE]:
        """With a device, true or fake."""
        gc.collect()  # what an earlier one leaves, on the device too
        fake = fake_device(FakeLink(clock=RealClock())) if self.is_fake else nullcontext()
        with fake, MoE(folder, device="auto" if self.is_fake else "cuda", **options) as moe:
            yield moe

    def synchronize(self) -> None:
        if not self.is_fake:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], *, rounds: int = 5) -> float:
        """Median, after one round to warm up."""
        times = []
        for _ in range(rounds + 1):
            self.synchronize()
            started = time.perf_counter()
            run()
            self.synchronize()
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])
