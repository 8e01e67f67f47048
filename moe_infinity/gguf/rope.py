"""How the positions of a GGUF model are scaled, in the words of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_infinity.errors import CheckpointError, UnsupportedModelError
from moe_infinity.gguf.file import WITH_CONFIG, GgufModel

YARN = {
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # of all models of Llama 3
FACTORS = "rope_freqs.weight"
UNREACHED = 1e20


def rope_parameters(
    gguf: GgufModel, theta: float, yarn: Mapping[str, Any], num_rotated: int | None = None
) -> dict[str, Any]:
    """transformers' rope_parameters. `yarn`: what the metadata do not say of it. `num_rotated`:
    columns of a head, where factors of more may be in the file. Raises UnsupportedModelError for
    what they do not say either.
    """
    kind, factor = _kind_and_factor(gguf)
    plain = {"rope_type": "default", "rope_theta": theta}
    tensors = [name for name in gguf.tensors if "rope_" in name]
    if tensors == [FACTORS] and kind == "none":
        scaled = _of_factors(gguf.numbers(FACTORS), theta, num_rotated)
        if scaled is not None:
            return plain | scaled
    if tensors:
        kind = f"the tensor {tensors[0]}"
    if kind == "none":
        return plain
    if kind == "linear":
        return plain | {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{gguf.files[0]}: positions scaled by {kind!r}, of which the metadata do not say all"
            f"\n{WITH_CONFIG}"
        )
    said = {name: gguf.value(key) for key, name in YARN.items() if gguf.value(key) is not None}
    original = gguf.value("rope.scaling.original_context_length", gguf.value("context_length"))
    return plain | dict(yarn) | said | {
        "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
    }  # fmt: skip


def two_ropes(
    gguf: GgufModel, *, full_share: float = 1.0, theta_swa: float | None = None
) -> dict[str, Any]:
    """Return the positions of layers with a sliding window, and of those without, which rotate this
    share of what the file says. `theta_swa`: with a window, where the file does not say it; None:
    as without.
    """
    theta = gguf.value("rope.freq_base", 1e4)
    theta_swa = theta if theta_swa is None else theta_swa
    head = gguf.value("attention.key_length")
    rotated = gguf.value("rope.dimension_count", head)
    rotated_swa = gguf.value("rope.dimension_count_swa", rotated)
    if not all(type(each) is int and each > 0 for each in (head, rotated, rotated_swa)):
        raise CheckpointError(f"{gguf.files[0]}: no size of a head of {gguf.architecture}")
    plain = {"rope_type": "default", "rope_theta": gguf.value("rope.freq_base_swa", theta_swa)}
    return {
        "rope_parameters": {
            "full_attention": rope_parameters(gguf, theta, {}, int(rotated * full_share))
            | {"partial_rotary_factor": rotated * full_share / head},
            "sliding_attention": plain | {"partial_rotary_factor": rotated_swa / head},
        }
    }


def require_one_base(gguf: GgufModel) -> None:
    """Raise UnsupportedModelError if layers with a window have a base of their own, for which the
    class in transformers has no place.
    """
    theta = gguf.value("rope.freq_base", 1e4)
    theta_swa = gguf.value("rope.freq_base_swa", theta)
    if theta_swa != theta:
        raise UnsupportedModelError(
            f"{gguf.files[0]}: {gguf.architecture}.rope.freq_base_swa is {theta_swa!r:.40}, but "
            f"all layers of such a model have one base, {theta!r:.40}"
        )


def proportional_rope(gguf: GgufModel) -> dict[str, Any]:
    """rope_parameters of Gemma 4's layers without a window. Its converter gives pairs of columns
    that are not rotated a factor that no position reaches. Raises UnsupportedModelError.
    """
    kind, _ = _kind_and_factor(gguf)
    if kind != "none":
        raise UnsupportedModelError(
            f"{gguf.files[0]}: positions of Gemma 4 that are scaled by {kind!r}\n{WITH_CONFIG}"
        )
    factors = gguf.numbers(FACTORS) if FACTORS in gguf.tensors else np.ones(1, np.float32)
    num_rotated = 0 if factors is None else int((factors == 1).sum())
    if factors is None or num_rotated == 0 or (factors[num_rotated:] < UNREACHED).any():
        raise UnsupportedModelError(
            f"{gguf.files[0]}: the tensor {FACTORS} is another than Gemma's\n{WITH_CONFIG}"
        )
    return {
        "rope_type": "proportional", "rope_theta": gguf.value("rope.freq_base", 10000.0),
        "partial_rotary_factor": num_rotated / len(factors),
    }  # fmt: skip


def _kind_and_factor(gguf: GgufModel) -> tuple[str, float]:
    """Return both as llama.cpp has it: a factor alone is linear, one of 0 is none."""
    factor = gguf.value("rope.scaling.factor") or gguf.value("rope.scale_linear") or 1.0
    kind = gguf.value("rope.scaling.type", "linear")
    return ("none" if kind == "linear" and factor == 1 else kind), factor


def _of_factors(
    factors: NDArray[np.float32] | None, theta: float, num_rotated: int | None
) -> dict[str, Any] | None:
    """Return what Llama 3 calls the scaling whose wavelengths are multiplied with these factors, {}
    if they change nothing. None if it is another.
    """
    is_known = factors is not None and np.isfinite(factors).all() and factors.min() >= 1
    if factors is None or not is_known or not theta > 0:
        return None
    num_pairs = len(factors) if num_rotated is None else num_rotated // 2
    if num_pairs > len(factors) or (factors[num_pairs:] != 1).any():
        return None
    factors = factors[:num_pairs]
    if factors.max() == 1:
        return {}
    lengths = 2 * np.pi * theta ** (np.arange(len(factors)) / len(factors))
    inverse = 1 / factors.astype(np.float64)
    factor = float(factors.max())
    smooth = (inverse - 1 / factor) / (1 - 1 / factor)  # 1: as it was, 0: divided by the factor
    between = np.flatnonzero((smooth > 0.01) & (smooth < 0.99))
    low, high = LLAMA3.values()
    if len(between) > 1:  # between the bounds it is linear in the inverse of the length
        ends = between[[0, -1]]
        _, start = np.polyfit(1 / lengths[ends], smooth[ends], 1)
        if start >= 0:
            return None
        high = round(low - low / float(start), 3)
    if len(between):
        original = round(float(lengths[between[0]] * (low + (high - low) * smooth[between[0]])))
        expected = np.clip((original / lengths - low) / (high - low), 0, 1)
    else:  # Llama 4 has nothing between the lengths that stay and those that are divided
        first = max(int((factors > 1).argmax()), 1)
        original = round(float(np.sqrt(lengths[first - 1] * lengths[first])))
        high = low
        expected = (lengths < original).astype(float)
    if not np.allclose(smooth, expected, atol=1e-3):
        return None
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip
