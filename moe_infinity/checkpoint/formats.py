"""Quantized checkpoints: which formats there are and how each packs a weight.

    config.json's quantization_config --find_format--> Format

A weight is packed where its tensors say so; lists of modules left out are not needed. Scales of
activations are dropped: everything is computed with unpacked weights. The arithmetic is in
kernels/unpack.py. No transformers here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from moe_infinity.checkpoint.float_formats import (
    FLOATS,
    MXFP4_OF_GPT_OSS,
    NVFP4,
    NVFP4_PACKED,
    OF_ACTIVATIONS,
    Measured,
    fp8_format,
    mxfp4_format,
)
from moe_infinity.checkpoint.packing import Format, PartFormat, PartShapes, Shape, WeightFormat
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.kernels import unpack
from moe_infinity.layout import NIBBLES, Block, Unpack

INT32 = frozenset({"I32"})
INDICES = frozenset({"I32", "I64"})
INT8 = frozenset({"I8"})
MODELOPT_ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "MXFP8", "NVFP4",
    "W4A16_NVFP4", "NVFP4_AWQ", "MXFP4", "W4A8_MXFP4_FP8", "W4A8_NVFP4_FP8",
    "MIXED_PRECISION",
)  # fmt: skip

BITS = ("load_in_4bit", "load_in_8bit")  # switches of bitsandbytes
Config = Mapping[str, Any]


def is_packed(quantization_config: Config) -> bool:
    """Return False if this quantization_config says that weights are stored as they are."""
    if _has_algorithm(quantization_config) and _details(quantization_config)["quant_algo"] is None:
        return False  # ModelOpt: only keys and values are packed
    method = str(quantization_config.get("quant_method") or "").lower()
    asked = map(quantization_config.get, BITS if method == "bitsandbytes" else quantization_config)
    return method != "none" and any(value not in (None, False, "") for value in asked)


def find_format(quantization_config: Config) -> Format:
    """The format of a checkpoint whose config.json has this quantization_config. Raises
    UnsupportedModelError.
    """
    method = str(quantization_config.get("quant_method") or "").lower().replace("_", "-")
    if method.startswith("modelopt") or (not method and _has_algorithm(quantization_config)):
        method = "modelopt"
    if method not in FORMATS:
        named = quantization_config.get("quant_method") or "an unnamed method"
        raise _unsupported(f"a checkpoint quantized with {named}")
    try:
        weights = FORMATS[method].find(quantization_config)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        if isinstance(error, UnsupportedModelError):
            raise
        raise _unsupported(f"{method} with a malformed quantization_config ({error!r})") from error
    return Format(method, weights)


def _unsupported(what: str) -> UnsupportedModelError:
    supported = "\n".join(f"{name:<20}{method.weights}" for name, method in FORMATS.items())
    return UnsupportedModelError(f"{what} is not supported, expected one of:\n{supported}")


def _require(method: str, config: Config, key: str, *allowed: object, default: object) -> None:
    if (found := config.get(key, default)) not in allowed:
        raise _unsupported(f"{method} with {key} {found!r}")


# Floats of 8 and 4 bits


def _find_fp8(config: Config) -> tuple[WeightFormat, ...]:
    """DeepSeek-V3's and Qwen3's, AutoFP8's and MXFP8: weight_scale_inv or weight_scale is what to
    multiply by. DeepSeek-V4's experts have 4 bits, and its scales are called scale, Mistral's
    qscale_weight.
    """
    _require("fp8", config, "fmt", "e4m3", "E4M3", "float8_e4m3", "float8_e4m3fn", default="e4m3")
    block = config.get("weight_block_size")
    blocks = [] if block is None else [_block(block), (1, 32)]
    return (
        *(fp8_format(suffix, blocks) for suffix in ("_scale_inv", "_scale")),
        *(fp8_format(scale, blocks, suffix=".weight") for scale in (".scale", ".qscale_weight")),
        *(mxfp4_format("", suffix) for suffix in ("_scale_inv", "_scale")),
        mxfp4_format(".weight", ".scale"),
    )


def _block(sizes: Sequence[int] | str) -> Block:
    rows, columns = map(int, sizes.split("x")) if isinstance(sizes, str) else sizes
    if not (type(rows) is type(columns) is int and rows > 0 and columns > 0):
        raise ValueError(f"block of {sizes}")
    return rows, columns


def _details(config: Config) -> Config:
    """Return ModelOpt's entries about weights: in hf_quant_config.json they are under
    "quantization", in config.json beside quant_method.
    """
    found: Config = config.get("quantization", config)
    return found


def _has_algorithm(config: Config) -> bool:
    details = _details(config)
    return isinstance(details, Mapping) and "quant_algo" in details


def _find_modelopt(config: Config) -> tuple[WeightFormat, ...]:
    """ModelOpt's. Which weight has which format is told by its tensors."""
    details = _details(config)
    for each in (details, *(details.get("quantized_layers") or {}).values()):
        algorithm = str(each.get("quant_algo")).upper()
        if algorithm not in MODELOPT_ALGORITHMS:
            raise _unsupported(f"modelopt with quant_algo {each.get('quant_algo')!r}")
        if "NVFP4" in algorithm:
            _require(f"modelopt {algorithm}", each, "group_size", 16, None, default=16)
    return (NVFP4, fp8_format("_scale", []), mxfp4_format("", "_scale"))


# compressed-tensors


def _find_compressed_tensors(config: Config) -> tuple[WeightFormat, ...]:
    """Any mix of the formats; which weight has which is told by its tensors."""
    blocks = []
    for group in (config.get("config_groups") or {}).values():
        if (weights := group.get("weights")) is None:
            continue
        _check_compressed_weights(weights, group.get("format") or config.get("format"))
        if (block := weights.get("block_structure")) is not None:
            blocks.append(_block(block))
    fp8 = fp8_format("_scale", blocks, name="float-quantized")
    return _INT4, _INT8, fp8, NVFP4_PACKED, mxfp4_format("_packed", "_scale")


def _check_compressed_weights(weights: Config, stored_format: object) -> None:
    kind = weights.get("type", "int"), weights.get("num_bits", 8), stored_format
    strategies = {
        ("int", 4, "pack-quantized"): ("group", "channel", None),
        ("int", 8, "int-quantized"): ("channel",),
        ("float", 8, "float-quantized"): ("tensor", "channel", "block", None),
        ("float", 8, "naive-quantized"): ("tensor", "channel", "block", None),
        ("float", 8, "mxfp8-quantized"): ("group", None),
        ("float", 4, "nvfp4-pack-quantized"): ("tensor_group", None),
        ("float", 4, "mxfp4-pack-quantized"): ("group", None),
    }
    if kind not in strategies:
        raise _unsupported("compressed-tensors {2} of type {0} with {1} bits".format(*kind))
    _require("compressed-tensors", weights, "strategy", *strategies[kind], default=None)
    _require(
        "compressed-tensors", weights, "actorder", None, False, "weight", "static", default=None
    )
    if kind[:2] != ("int", 4):
        _require(f"compressed-tensors {kind[2]}", weights, "symmetric", True, default=True)


def _measure_int4(shapes: PartShapes) -> Measured:
    """A width that is no multiple of 8 is only in the values of weight_shape; no model has one."""
    num_rows, num_words = shapes["values"]
    shape = (num_rows, NIBBLES * num_words)
    scales = shapes["scale"]
    if len(scales) != 2 or scales[0] != num_rows or not scales[1] or shape[1] % scales[1]:
        return None
    if shapes.get("zeros") not in (None, (-(-num_rows // NIBBLES), scales[1])):
        return None
    return shape, (1, shape[1] // scales[1])


# The weight is called NAME.weight as a rule; our own packer also packs one stacked over experts,
# which may be called otherwise.
_INT4 = WeightFormat(
    "pack-quantized",
    "int4",
    (
        PartFormat("values", "_packed", INT32),
        PartFormat("scale", "_scale", FLOATS),
        PartFormat("zeros", "_zero_point", INT32, is_optional=True),
    ),
    _measure_int4,
    lambda p, _, dtype: unpack.int4_rows(p["values"], p["scale"], p.get("zeros"), dtype),
    ignored=("weight_shape", *OF_ACTIVATIONS),
)


def _measure_int8(shapes: PartShapes) -> Measured:
    num_rows, num_columns = shapes["values"]
    return ((num_rows, num_columns), (1, num_columns)) if shapes["scale"] == (num_rows, 1) else None


_INT8 = WeightFormat(
    "int-quantized",
    "int8",
    (PartFormat("values", "", INT8), PartFormat("scale", "_scale", FLOATS)),
    _measure_int8,
    lambda parts, _, dtype: unpack.int8_rows(parts["values"], parts["scale"], dtype),
    ignored=OF_ACTIVATIONS,
)


# What moe-infinity packs itself, by kind.
PACKED_BY_US = {"int4": _INT4, "int8": _INT8, "fp8": fp8_format("_scale", [])}


# GPTQ and AWQ


def _find_gptq(config: Config) -> tuple[WeightFormat, ...]:
    """AutoGPTQ and GPTQModel. The older checkpoint_format "gptq" stores zeros less one."""
    _require("gptq", config, "bits", 4, default=None)
    stored_format = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if stored_format not in ("gptq", "gptq_v2"):
        raise _unsupported(f"gptq with checkpoint_format {stored_format!r}")
    is_in_order = config.get("desc_act") is False
    for pattern, changes in (config.get("dynamic") or {}).items():
        if not pattern.startswith("-:"):  # those are left as they were
            _require(f"gptq of {pattern}", changes, "bits", 4, default=4)
            is_in_order &= not changes.get("desc_act")
    group_size = int(config.get("group_size") or 0)

    def measure(shapes: PartShapes) -> Measured:
        """No block where the last group is shorter, or columns are not known to be in order."""
        if (shape := _gptq_shape(shapes)) is None:
            return None
        num_columns = shape[1]
        num_groups = shapes["scale"][0]
        size = num_columns if num_groups == 1 else group_size
        in_order = is_in_order and num_columns == num_groups * size
        return shape, (1, size) if in_order else None

    index = PartFormat("groups", ".g_idx", INDICES, is_optional=True)
    adds_one = stored_format == "gptq"
    return (
        _words_format(
            stored_format,
            measure,
            lambda parts, _, dtype: unpack.gptq(parts, dtype, adds_one_to_zeros=adds_one),
            index,
        ),
    )


def _gptq_shape(shapes: PartShapes) -> Shape | None:
    shape = NIBBLES * shapes["values"][0], shapes["values"][1]  # [C, R]
    if not _fits_groups(shapes, shape):
        return None
    if (index := shapes.get("groups")) is None:
        return shape[::-1] if shape[0] % shapes["scale"][0] == 0 else None
    return shape[::-1] if index == shape[:1] else None


def _find_awq(config: Config) -> tuple[WeightFormat, ...]:
    """AutoAWQ."""
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise _unsupported(f"awq with bits {bits!r}")
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise _unsupported(f"awq with version {version!r}")
    _require("awq", config, "zero_point", True, default=True)
    return (_words_format("awq", _measure_awq, lambda p, _, dtype: unpack.awq(p, dtype)),)


def _measure_awq(shapes: PartShapes) -> Measured:
    num_columns = shapes["values"][0]
    num_rows = NIBBLES * shapes["values"][1]
    if not _fits_groups(shapes, (num_columns, num_rows)):
        return None
    size, rest = divmod(num_columns, shapes["scale"][0])
    return None if rest else ((num_rows, num_columns), (1, size))


def _fits_groups(shapes: PartShapes, shape_CR: tuple[int, int]) -> bool:
    num_columns, num_rows = shape_CR
    scales = shapes["scale"]
    zeros = shapes["zeros"]
    return (
        len(scales) == 2
        and 0 < scales[0] <= num_columns
        and scales[1] == num_rows
        and zeros == (scales[0], num_rows // NIBBLES)
        and num_rows % NIBBLES == 0
    )


def _words_format(name: str, measure: Any, unpack_one: Unpack, *more: PartFormat) -> WeightFormat:
    parts = (
        PartFormat("values", ".qweight", INT32),
        PartFormat("zeros", ".qzeros", INT32),
        PartFormat("scale", ".scales", FLOATS),
        *more,
    )
    return WeightFormat(name, name, parts, measure, unpack_one, weight_suffix=".weight")


class Method(NamedTuple):
    """A quant_method of config.json."""

    weights: str  # that it stores, for the message
    # How weights may be packed in a checkpoint with this quantization_config. Raises
    # UnsupportedModelError for one that it does not know.
    find: Callable[[Config], tuple[WeightFormat, ...]]


FORMATS = {
    "fp8": Method("float8_e4m3fn with scales per block, row or tensor; 4-bit experts", _find_fp8),
    "mxfp8": Method("float8_e4m3fn with power-of-two scales", _find_fp8),
    "mxfp4": Method("as gpt-oss is published", lambda config: (MXFP4_OF_GPT_OSS,)),
    "modelopt": Method("NVFP4, FP8, MXFP8 and MXFP4 of ModelOpt", _find_modelopt),
    "compressed-tensors": Method(
        "pack-quantized int4 per group or channel, int-quantized int8 per channel, "
        "float-quantized fp8, mxfp8, nvfp4 and mxfp4",
        _find_compressed_tensors,
    ),
    "gptq": Method("4 bits, checkpoint_format gptq or gptq_v2", _find_gptq),
    "awq": Method("4 bits, version gemm", _find_awq),
}
