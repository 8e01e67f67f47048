"""The options of a model: what each is by default, its unit, and its check. Unknown names and
impossible values fail here; predict/predictor.py checks those that depend on the policy.

Sizes are given as bytes (an int), as text with a unit ("8GiB", "500MB"), or as a share of all
expert bytes ("25%").
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_infinity.errors import ConfigError
from moe_infinity.sizes import parse_size

# "auto" is our own kernels wherever they know the weights, summing in float32; "fast" is the same,
# and an error where a GPU cannot use them. The other two are those of transformers, bit for bit.
EXACT_IMPLEMENTATIONS = ("grouped_mm", "eager")
EXPERTS_IMPLEMENTATIONS = ("auto", "fast", *EXACT_IMPLEMENTATIONS)
EXPERT_DTYPES = ("int4", "int8", "fp8")
KV_DTYPES = ("auto", "int8", "fp8")
PRELOADS = ("off", "idle", "wait")
GPU_ENGINES = ("auto", "graphs", "host")
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
DTYPES = ("auto", "bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """How a model is kept and computed. Frozen; `MoE(...)` takes the same names as keyword
    arguments.
    """

    # For everything that this process has in memory: bytes or "8GiB"; None: what is free.
    memory: int | str | None = None
    # Of it, for expert slots: bytes, "8GiB", "25%" of all experts; None: what the rest leaves.
    host_memory: int | str | None = None
    device: str = "auto"  # "cpu", "cuda", "cuda:1", "mps"; "auto": a CUDA GPU if there is one
    # For expert slots on the GPU, as host_memory; None: most of what is free beside dense weights.
    device_memory: int | str | None = None
    policy: str = "activation-aware"  # which expert leaves first, one of cache.policies.POLICIES
    # Load experts ahead of their layer, with a policy that predicts; None: as long as it pays,
    # which is measured.
    prefetch: bool | None = None
    # Ask the next layer's router early; more exact prefetch, more to compute.
    early_router: bool = False
    # "idle": while slots are free, read experts that no layer has asked for; "wait": and fill all
    # slots before the first token; "off": read only what a layer asks for, or `prefetch` predicts.
    preload: str = "idle"
    stream_layers: bool = True  # in a long prompt, load the next layer's experts while one computes
    history: str | Path | None = None  # file to learn on from, written at close; None: forget
    without: tuple[str, ...] = ()  # FACTORS the predictor leaves out, for ablation
    config_from: str | None = None  # folder or hub id whose config and tokenizer are used instead
    mmproj: str | Path | None = None  # a GGUF model's vision part; None: the one beside it
    dtype: str = "auto"  # of weights and activations; "auto": as stored in the checkpoint
    expert_dtype: str | None = None  # pack experts into one of EXPERT_DTYPES as they are loaded
    kv_dtype: str = "auto"  # of keys and values, one of KV_DTYPES; "auto": as the model computes
    exact: bool = False  # the bits of transformers, more slowly; short for "grouped_mm" below
    experts_implementation: str = "auto"  # how experts compute, see EXPERTS_IMPLEMENTATIONS
    # Drives a GPU: "graphs" lets it decide and replays decode steps as CUDA graphs; with "host" the
    # CPU reads each layer's routing; "auto" takes graphs where the model allows it.
    gpu_engine: str = "auto"
    trust_remote_code: bool = False  # run Python code that the checkpoint brings with it
    num_read_threads: int = 4  # experts read at once, and threads that share their bytes

    def __post_init__(self) -> None:
        self._require_one_of("dtype", DTYPES)
        self._require_one_of("expert_dtype", (None, *EXPERT_DTYPES))
        self._require_one_of("kv_dtype", KV_DTYPES)
        self._require_one_of("preload", PRELOADS)
        self._require_one_of("gpu_engine", GPU_ENGINES)
        self._require_one_of("experts_implementation", EXPERTS_IMPLEMENTATIONS)
        if not isinstance(self.config_from, str | None):
            raise ConfigError(f"config_from must be a folder or hub id, got {self.config_from!r}")
        for name in ("history", "mmproj"):
            if not isinstance(getattr(self, name), str | Path | None):
                raise ConfigError(f"{name} must be a file name, got {getattr(self, name)!r}")
        if self.prefetch not in (None, False, True):
            raise ConfigError(f"prefetch must be None, True or False, got {self.prefetch!r}")
        for name in ("early_router", "stream_layers", "exact", "trust_remote_code"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not isinstance(self.device, str) or not DEVICE.fullmatch(self.device):
            raise ConfigError(
                f"unknown device {self.device!r}, expected 'auto', 'cpu', 'cuda', 'cuda:1' or 'mps'"
            )
        if self.exact and self.experts_implementation == "fast":
            raise ConfigError("exact is for the bits of transformers, which 'fast' does not give")
        if self.is_exact and self.kv_dtype != "auto":
            raise ConfigError(
                f"exact is for the bits of transformers, which kv_dtype={self.kv_dtype!r} changes"
            )
        for size in (self.host_memory, self.device_memory):
            if size is not None:
                parse_size(size, whole_bytes=0)
        if self.memory_bytes == 0:
            raise ConfigError(f"memory must be a size such as '8GiB', got {self.memory!r}")
        if self.device in ("cpu", "mps") and self.device_memory is not None:
            raise ConfigError(
                f"device_memory is for a CUDA GPU; with device={self.device!r} use host_memory"
            )
        if self.device == "mps" and self.experts_implementation == "fast":
            raise ConfigError("experts_implementation='fast': none of our kernels runs on mps")
        threads = self.num_read_threads
        if type(threads) is not int or threads < 1:
            raise ConfigError(f"num_read_threads must be a whole number above 0, got {threads!r}")

    @property
    def memory_bytes(self) -> int | None:
        """The number of `memory`, which cannot be a share."""
        return None if self.memory is None else parse_size(self.memory, whole_bytes=0)

    @property
    def is_exact(self) -> bool:
        """True if results have the bits of transformers."""
        return self.exact or self.experts_implementation in EXACT_IMPLEMENTATIONS

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
        """A config with keyword options on top. Names of the older MoE-Infinity are understood.
        Raises ConfigError.
        """
        merged = options_of(config) | options
        known = {f.name for f in dataclasses.fields(cls)}
        if not merged.keys() <= known:
            from moe_infinity import legacy  # no config of ours needs it

            merged = legacy.translated(merged)
        unknown = sorted(merged.keys() - known)
        if unknown:
            raise ConfigError(
                f"unknown option {', '.join(unknown)}, expected some of: {', '.join(sorted(known))}"
            )
        return cls(**merged)


def options_of(config: OffloadConfig | dict[str, Any] | str | Path | None) -> dict[str, Any]:
    """The options in a config of any kind, by name. Raises ConfigError."""
    if isinstance(config, OffloadConfig):
        return {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    if isinstance(config, str | Path):
        return _read_json(Path(config))
    if not isinstance(config, dict | None):
        raise ConfigError(f"config must be an OffloadConfig, a dict or a JSON file, got {config!r}")
    return config or {}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        options = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not a JSON file with options: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"{file}: expected a JSON object with options, found {options!r}")
    return options
