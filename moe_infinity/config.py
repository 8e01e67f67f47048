"""Every knob once: its default, its unit, its check. Unknown names and impossible values fail here.

Sizes are given as bytes (an int), as text with a unit ("8GiB", "500MB"), or as a share of all
expert bytes ("25%").
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_infinity.cache.policies import ACTIVATION_AWARE, POLICIES, PREDICTING
from moe_infinity.errors import ConfigError
from moe_infinity.memory.machine import device_memory_bytes, machine_memory_bytes
from moe_infinity.predict.predictor import FACTORS

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}

# The last two are those of transformers whose arithmetic we reproduce bit for bit. "fast" is our
# own kernels, summing in float32, for experts and, in steps of few tokens, for
# what surrounds them; "auto" is that for packed weights, and grouped_mm for others.
EXPERTS_IMPLEMENTATIONS = ("auto", "fast", "grouped_mm", "eager")
EXPERT_DTYPES = ("int4", "int8", "fp8")
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
DTYPES = ("auto", "bfloat16", "float16", "float32")

# Options of the MoE-Infinity that was published with the paper -> what to tell its user.
LEGACY_IGNORED = {
    "offload_path": "experts are read in place from the checkpoint, no copy is kept; remove it",
    "device_memory_ratio": "torch finds no CUDA device, experts run on the CPU; remove it",
    "trace_capacity": "the collection of earlier requests keeps 120; remove it",
    "trace_path": "use `history`, a file that is made when the model is closed",
    "num_threads": "use `num_read_threads` for disk reads and torch.set_num_threads() for compute",
}


def parse_size(value: int | str, *, whole_bytes: int) -> int:
    """Bytes of 8_000_000_000, "8GiB", "500 MB" or "25%" (of `whole_bytes`). Raises ConfigError."""
    text = str(value).strip()
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    sized = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if percent:
        return int(whole_bytes * float(percent[1]) / 100)
    if isinstance(value, bool) or not sized or sized[2].upper() not in UNITS or len(text) > 40:
        raise ConfigError(
            f"{value!r} is not a size, "
            "expected bytes (8000000000), a unit ('8GiB', '500MB') or '25%'"
        )
    return int(float(sized[1]) * UNITS[sized[2].upper()])


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """How a model is kept and computed. Frozen; `MoE(...)` takes the same names as keyword
    arguments.
    """

    host_memory: int | str | None = (
        None  # for expert slots: bytes, "8GiB", "25%" of all experts; None: what is free
    )
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; "auto": a GPU if there is one
    # For expert slots on the GPU, as host_memory; None: most of what is free beside dense weights.
    device_memory: int | str | None = None
    policy: str = ACTIVATION_AWARE  # which expert leaves first, one of POLICIES
    prefetch: bool = False  # load experts ahead of their layer; needs a policy that predicts
    early_gate: bool = (
        False  # ask the next layer's router early; more exact prefetch, more to compute
    )
    history: str | Path | None = None  # file to learn on from, written at close; None: forget
    without: tuple[str, ...] = ()  # FACTORS the predictor leaves out, for ablation
    dtype: str = "auto"  # of weights and activations; "auto": as stored in the checkpoint
    expert_dtype: str | None = None  # pack experts into one of EXPERT_DTYPES as they are loaded
    experts_implementation: str = "auto"  # how experts compute, see EXPERTS_IMPLEMENTATIONS
    trust_remote_code: bool = False  # run Python code that the checkpoint brings with it
    num_read_threads: int = 4  # experts read at once, and threads that share their bytes

    def __post_init__(self) -> None:
        self._require_one_of("policy", POLICIES)
        is_list = isinstance(self.without, tuple | list)
        if not is_list or not all(name in FACTORS for name in self.without):
            raise ConfigError(f"without names some of {', '.join(FACTORS)}, not {self.without!r}")
        if self.without and self.policy != ACTIVATION_AWARE:
            raise ConfigError(f"policy {self.policy} has no factors to leave out")
        self._require_one_of("dtype", DTYPES)
        self._require_one_of("expert_dtype", (None, *EXPERT_DTYPES))
        self._require_one_of("experts_implementation", EXPERTS_IMPLEMENTATIONS)
        if not isinstance(self.history, str | Path | None):
            raise ConfigError(f"history must be a file name, got {self.history!r}")
        if self.history is not None and self.policy != ACTIVATION_AWARE:
            raise ConfigError(f"policy {self.policy} keeps no history, {ACTIVATION_AWARE} does")
        if self.without and self.history is not None:
            raise ConfigError("without is for ablation: it would spoil what the history keeps")
        for name in ("prefetch", "early_gate", "trust_remote_code"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.prefetch and self.policy not in PREDICTING:
            raise ConfigError(
                f"policy {self.policy} predicts nothing, so it cannot prefetch; "
                f"use one of: {', '.join(PREDICTING)}"
            )
        if self.early_gate and not (self.prefetch and self.policy == ACTIVATION_AWARE):
            raise ConfigError(f"early_gate serves prefetch=True with policy {ACTIVATION_AWARE}")
        if not isinstance(self.device, str) or not DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"unknown device {self.device!r}, expected 'auto', 'cpu', 'cuda' or 'cuda:1'"
            )
        for size in (self.host_memory, self.device_memory):
            if size is not None:
                parse_size(size, whole_bytes=0)
        if self.device == "cpu" and self.device_memory is not None:
            raise ConfigError("device_memory is for a GPU; with device='cpu' use host_memory")
        if type(threads := self.num_read_threads) is not int or threads < 1:
            raise ConfigError(f"num_read_threads must be a whole number above 0, got {threads!r}")

    def _require_one_of(self, name: str, allowed: tuple[str | None, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            names = ", ".join(map(str, allowed))
            raise ConfigError(f"unknown {name} {value!r}, expected one of: {names}")

    @classmethod
    def from_options(
        cls,
        config: OffloadConfig | dict[str, Any] | str | Path | None,
        options: dict[str, Any],
    ) -> OffloadConfig:
        """A config, or the dict of the older MoE-Infinity, with keyword options on top. Raises
        ConfigError.
        """
        if isinstance(config, str | Path):
            config = _read_json(Path(config))
        if isinstance(config, OffloadConfig):
            merged = {f.name: getattr(config, f.name) for f in dataclasses.fields(cls)} | options
        else:
            if not isinstance(config, dict | None):
                raise ConfigError(
                    f"config must be an OffloadConfig, a dict or a JSON file, got {config!r}"
                )
            merged = _translate_legacy((config or {}) | options)
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(merged) - known)
        if unknown:
            raise ConfigError(
                f"unknown option {', '.join(unknown)}, expected some of: {', '.join(sorted(known))}"
            )
        return cls(**merged)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        options = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not a JSON file with options: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"{file}: expected a JSON object with options, found {options!r}")
    return options


def _translate_legacy(options: dict[str, Any]) -> dict[str, Any]:
    """Honour or answer each key of the older config dict."""
    kept: dict[str, Any] = {}
    for name, value in options.items():
        device_memory = None
        if name == "device_memory_ratio":
            device_memory = memory_of_ratio(value, str(options.get("device", "auto")))
        if device_memory is not None:
            kept["device_memory"] = device_memory
        elif name in LEGACY_IGNORED:
            warnings.warn(
                f"option {name!r} has no effect: {LEGACY_IGNORED[name]}", UserWarning, stacklevel=4
            )
        elif name == "host_memory_ratio":
            kept["host_memory"] = int(_ratio(name, value) * machine_memory_bytes())
        else:
            kept[name] = value
    return kept


def memory_of_ratio(ratio: Any, device: str) -> int | None:
    """The device_memory of an older device_memory_ratio; None without a GPU. Raises ConfigError."""
    share = _ratio("device_memory_ratio", ratio)
    num_bytes = device_memory_bytes(device)
    return None if num_bytes is None else int(share * num_bytes)


def _ratio(name: str, ratio: Any) -> float:
    if type(ratio) not in (int, float) or not 0 < ratio <= 1:
        raise ConfigError(f"{name} must be above 0 and at most 1, got {ratio!r}")
    return float(ratio)
