"""The machine that a plan is for, and how the command line tells it. Without torch."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_infinity.errors import ConfigError
from moe_infinity.sizes import parse_size

OPERATIONS = re.compile(r"(\d+(?:\.\d+)?)\s*([MGT])FLOPS?(?:/s)?", re.IGNORECASE)
SCALES = {"M": 1e6, "G": 1e9, "T": 1e12}
RUNTIME_BYTES = 1 << 29  # where it is not measured, docs/options.md


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMachine:
    """Rates are per second. What is not measured or told is assumed, and named so."""

    cores: int = 8
    ram: float = 32 * 2**30  # bytes that a new process may have
    runtime: int = RUNTIME_BYTES  # of them, what Python and torch take
    lockable: float = float("inf")  # of them, bytes that may be page-locked
    disk: float = 2e9  # bytes of random reads as large as an expert
    memory: float = 50e9  # bytes that all cores together read
    new_memory: float = 5e9  # bytes of memory that the system gives at their first use
    products: float = 300e9  # operations of the products that prompts are made of
    gpu: float = 0  # bytes of its memory that are free; 0: none
    gpu_name: str = "none"
    link: float = 20e9  # bytes from page-locked memory to the GPU
    gpu_memory: float = 500e9  # bytes that the GPU reads of its own
    assumed: frozenset[str] = field(default=frozenset())

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON: no limit is null."""
        found = asdict(self) | {"assumed": sorted(self.assumed)}
        return found | {"lockable": None if self.lockable == float("inf") else self.lockable}


SIZES = ("ram", "gpu")
RATES = ("disk", "memory", "new_memory", "link", "gpu_memory")
TOLD = ("cores", *SIZES, *RATES, "products")


def parse_machine(text: str) -> PlanMachine:
    """Read a machine from "ram=32GiB,disk=3GB/s,gpu=24GiB,link=25GB/s,cores=8,memory=60GB/s".
    Raises ConfigError.
    """
    told: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value = part.partition("=")
        name = name.strip()
        if name not in TOLD:
            raise ConfigError(
                f"--machine: unknown {name!r}, expected some of: {', '.join(TOLD)}\n"
                "hint: --machine 'ram=32GiB,disk=3GB/s,gpu=24GiB,link=25GB/s,cores=8'"
            )
        if name in told:
            raise ConfigError(f"--machine: {name} is given twice")
        told[name] = _value_of(name, value.strip())
    if not told:
        raise ConfigError(
            "--machine: nothing is given, expected for example 'ram=32GiB,disk=3GB/s'"
        )
    needless = () if told.get("gpu") else ("link", "gpu_memory")
    for name in needless:
        if name in told:
            raise ConfigError(f"--machine: {name} is of a GPU, and gpu is not given")
    assumed = frozenset(TOLD) - told.keys() - {"gpu", *needless}
    if "gpu" in told:
        told["gpu_name"] = "a GPU"
    return PlanMachine(**told, assumed=assumed)


def _value_of(name: str, value: str) -> float:
    """Raises ConfigError."""
    found: float = 0
    if name == "cores":
        found = int(value) if value.isdecimal() and len(value) < 6 else 0
    elif name == "products":
        match = OPERATIONS.fullmatch(value)
        found = float(match[1]) * SCALES[match[2].upper()] if match else 0
    elif value.endswith("/s") == (name in RATES):
        with suppress(ConfigError):
            found = parse_size(value.removesuffix("/s"), whole_bytes=0)
    if found <= 0:
        examples = {"cores": "8", "products": "300GFLOP/s"} | dict.fromkeys(RATES, "3GB/s")
        example = examples.get(name, "24GiB")
        raise ConfigError(f"--machine: {name}={value!r}, expected for example {name}={example}")
    return found
