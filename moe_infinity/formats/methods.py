"""Quantized checkpoints: which formats there are and how each packs a weight.

    config.json's quantization_config --find_format--> Format

A weight is packed where its tensors say so; lists of modules left out are not needed. Scales of
activations are dropped: everything is computed with unpacked weights. The arithmetic is in
kernels/unpack.py. No transformers here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from moe_infinity.checkpoint.packing import Format, PartFormat, PartShapes, WeightFormat
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.formats.float_formats import (
    FLOATS,
    MXFP4_OF_GPT_OSS,
    NVFP4,
    NVFP4_PACKED,
    OF_ACTIVATIONS,
    Measured,
    fp8_format,
    mxfp4_format,
)
from moe_infinity.kernels import unpack
from moe_infinity.kernels.word_shapes import (
    GPTQ_BITS,
    Width,
    measure_awq,
    measure_gptq,
    measure_ints,
)
from moe_infinity.layout import GROUP_OF_MXFP4, Block, Unpack

INT32 = frozenset({"I32"})
INDICES = frozenset({"I32", "I64"})
INT8 = frozenset({"I8"})
MODELOPT_ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "MXFP8", "NVFP4",
    "W4A16_NVFP4", "NVFP4_AWQ", "MXFP4", "W4A8_MXFP4_FP8", "W4A8_NVFP4_FP8",
    "MIXED_PRECISION",
)  # fmt: skip

AUTO_ROUND = {  # packing_format: which method, or checkpoint_format of GPTQ, packs alike
    "auto": "gptq", "auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq",
    "auto_round:gptq:exllamav2": "gptq", "auto_round": "gptq_v2", "auto_round:exllamav2": "gptq_v2",
    "auto_round:gptqmodel": "gptq_v2", "auto_round:auto_awq": "awq", "auto_round:awq": "awq",
    "auto_round:llm_compressor": "compressed-tensors", "auto_round:fp8_static": "fp8",
}  # fmt: skip
OF_INTS = ("int", "int_sym", "int_asym")
DATA_TYPES = {
    "gptq": OF_INTS, "gptq_v2": OF_INTS, "awq": OF_INTS, "fp8": ("fp", "fp8", "fp8_e4m3"),
    "compressed-tensors": (
        "mx_fp", "mx_fp4", "mx_fp8", "mx_fp_rceil", "nv_fp", "nv_fp4", "nv_fp4_with_static_gs",
    ),
}  # fmt: skip
# Those that change weights before they are quantized; others also change what they multiply.
QUARK_ALGORITHMS = ("smooth", "autosmoothquant", "awq", "gptq", "gptaq", "autoround", "qronos")
BY_INDEX = ("group", "dynamic", True)  # actorder with groups of columns in any order
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
    method = method.removeprefix("intel/").removesuffix("-marlin")  # a kernel of vLLM
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


def _find_quark(config: Config) -> tuple[WeightFormat, ...]:
    """AMD's. Which weight has which format is told by its tensors."""
    by_layer = ("layer_quant_config", "layer_type_quant_config")
    told = {name: layer for key in by_layer for name, layer in (config.get(key) or {}).items()}
    for name, layer in {"global_quant_config": config["global_quant_config"], **told}.items():
        if (weight := (layer or {}).get("weight")) is None:
            continue
        what = f"quark, weight of {name},"
        if isinstance(weight, list):
            if len(weight) != 1:  # one packed in another
                raise _unsupported(f"{what} with dtypes {[each.get('dtype') for each in weight]}")
            (weight,) = weight
        _require(what, weight, "dtype", "fp8_e4m3", "fp4", default=None)
        if weight["dtype"] == "fp4":
            _require(what, weight, "scale_format", "e8m0", default=None)
            _require(what, weight, "group_size", GROUP_OF_MXFP4, default=None)
        else:
            _require(what, weight, "qscheme", "per_tensor", "per_channel", default=None)
            _require(what, weight, "ch_axis", 0, None, default=None)
    export = config.get("export") or {}
    _require("quark", export, "weight_format", "real_quantized", default="real_quantized")
    for algorithm in config.get("algo_config") or ():
        _require("quark with algo_config", algorithm, "name", *QUARK_ALGORITHMS, default=None)
    return fp8_format("_scale", []), mxfp4_format("", "_scale")


def _find_fbgemm(config: Config) -> tuple[WeightFormat, ...]:
    """A scale per row of a linear layer; Llama 4's experts are stacked as [E, C, R], gate_up_proj
    with scales [E, 1, R], down_proj with [E, R, 1].
    """

    def measure(suffix: str, shapes: PartShapes) -> Measured:
        first, last = shapes["values"]
        grid, block = {
            ".weight": ((first, 1), (1, last)),
            ".gate_up_proj": ((1, last), (first, 1)),
            ".down_proj": ((last, 1), (first, 1)),
        }[suffix]
        return (shapes["values"], block) if shapes["scale"] == grid else None

    suffixes = (".weight", ".gate_up_proj", ".down_proj")
    formats = (fp8_format(f"{suffix}_scale", [], suffix=suffix) for suffix in suffixes)
    return tuple(replace(each, measure=partial(measure, each.weight_suffix)) for each in formats)


# compressed-tensors


def _find_compressed_tensors(config: Config) -> tuple[WeightFormat, ...]:
    """Any mix of the formats; which weight has which is told by its tensors."""
    _require("compressed-tensors", config, "transform_config", None, {}, default=None)
    blocks = []
    widths = []
    for group in (config.get("config_groups") or {}).values():
        if (weights := group.get("weights")) is None:
            continue
        _check_compressed_weights(weights, group.get("format") or config.get("format"))
        if (block := weights.get("block_structure")) is not None:
            blocks.append(_block(block))
        if weights.get("type", "int") == "int":
            size = -1 if weights.get("strategy") == "channel" else weights.get("group_size")
            has_index = weights.get("actorder") in BY_INDEX
            widths.append(Width(weights.get("num_bits", 8), size, has_index))
    ints = _packed_ints(widths or [Width(4)])
    fp8 = fp8_format("_scale", blocks, name="float-quantized")
    return ints, _INT8, fp8, NVFP4_PACKED, mxfp4_format("_packed", "_scale")


def _check_compressed_weights(weights: Config, stored_format: object) -> None:
    kind = weights.get("type", "int"), weights.get("num_bits", 8), stored_format
    is_packed = stored_format == "pack-quantized"
    strategies = {
        ("int", 4, "pack-quantized"): ("group", "channel", None),
        ("int", 8, "pack-quantized"): ("group", "channel", None),
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
    orders = (None, False, "weight", "static", *(BY_INDEX if is_packed else ()))
    _require("compressed-tensors", weights, "actorder", *orders, default=None)
    if not is_packed:
        _require(f"compressed-tensors {kind[2]}", weights, "symmetric", True, default=True)


def _packed_ints(widths: Sequence[Width]) -> WeightFormat:
    """The format of integers of these widths; shapes tell which of them a weight has. It is called
    NAME.weight as a rule; our own packer also packs one stacked over experts, which may be called
    otherwise.
    """

    return WeightFormat(
        "pack-quantized",
        "int4",
        (
            PartFormat("values", "_packed", INT32),
            PartFormat("scale", "_scale", FLOATS),
            PartFormat("zeros", "_zero_point", INT32, is_optional=True),
            PartFormat("groups", "_g_idx", INDICES, is_optional=True),
        ),
        lambda shapes: measure_ints(shapes, widths),
        unpack.int_rows,
        ignored=("weight_shape", *OF_ACTIVATIONS),
        kind_of_bytes="uint8",
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
PACKED_BY_US = {
    "int4": _packed_ints([Width(4)]),
    "int8": _INT8,
    "fp8": fp8_format("_scale", []),
}


# GPTQ and AWQ


def _find_gptq(config: Config) -> tuple[WeightFormat, ...]:
    """AutoGPTQ and GPTQModel. The older checkpoint_format "gptq" stores zeros less one."""
    _require("gptq", config, "bits", *GPTQ_BITS, default=None)
    stored_format = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if stored_format not in ("gptq", "gptq_v2"):
        raise _unsupported(f"gptq with checkpoint_format {stored_format!r}")
    is_in_order = config.get("desc_act") is False
    sizes = {int(config.get("group_size") or 0)}
    for pattern, changes in (config.get("dynamic") or {}).items():
        if not pattern.startswith("-:"):  # those are left as they were
            _require(f"gptq of {pattern}", changes, "bits", *GPTQ_BITS, default=4)
            is_in_order &= not changes.get("desc_act")
            sizes.add(int(changes.get("group_size") or 0))
    index = PartFormat("groups", ".g_idx", INDICES, is_optional=True)
    return (
        _words_format(
            stored_format,
            lambda shapes: measure_gptq(shapes, sizes - {0}, is_in_order=is_in_order),
            partial(unpack.gptq, adds_one_to_zeros=stored_format == "gptq"),
            index,
        ),
    )


def _find_awq(config: Config) -> tuple[WeightFormat, ...]:
    """AutoAWQ. Symmetric weights have zero points, too, which are the middle."""
    bits = config.get("bits", config.get("w_bit"))
    if bits != 4:
        raise _unsupported(f"awq with bits {bits!r}")
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise _unsupported(f"awq with version {version!r}")
    _require("awq", config, "pack_method", "reorder", default="reorder")
    return (_words_format("awq", measure_awq, lambda p, _, dtype: unpack.awq(p, dtype)),)


def _words_format(name: str, measure: Any, unpack_one: Unpack, *more: PartFormat) -> WeightFormat:
    parts = (
        PartFormat("values", ".qweight", INT32),
        PartFormat("zeros", ".qzeros", INT32),
        PartFormat("scale", ".scales", FLOATS),
        *more,
    )
    return WeightFormat(name, name, parts, measure, unpack_one, weight_suffix=".weight")


def _find_auto_round(config: Config) -> tuple[WeightFormat, ...]:
    """Intel's. Its packing_format, once called backend, says which other method packs alike, and
    extra_config what differs, by names or patterns of modules.
    """
    named = config.get("packing_format") or config.get("backend") or "auto"
    stored = "fp8" if config.get("data_type") == "fp" else AUTO_ROUND.get(named)
    if stored is None:
        raise _unsupported(f"auto-round with packing_format {named!r}")
    for rotation in ("rotation_config", "spinquant_config"):
        _require("auto-round", config, rotation, None, {}, default=None)
    packed = {}
    for name, changes in {"weights": {}, **(config.get("extra_config") or {})}.items():
        scheme = {**config, **changes}
        if scheme["bits"] >= 16:
            continue
        packed[name] = scheme
        _require(f"auto-round of {name}", scheme, "data_type", *DATA_TYPES[stored], default="int")
        if "int" in DATA_TYPES[stored]:
            _require(f"auto-round of {name}", scheme, "act_bits", None, 16, 32, default=None)
        if stored == "awq":
            _require(f"auto-round of {name}", scheme, "bits", 4, default=None)
    if stored == "awq":
        return _find_awq({"bits": 4})
    if stored == "fp8":
        size = config.get("group_size")
        return _find_fp8({"weight_block_size": size if isinstance(size, list) else None, **config})
    if stored == "compressed-tensors":
        return _find_compressed_tensors({})
    return _find_gptq({**config, "checkpoint_format": stored, "desc_act": False, "dynamic": packed})


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
    "quark": Method("float8_e4m3fn per row or tensor, mxfp4 of AMD's Quark", _find_quark),
    "fbgemm-fp8": Method("float8_e4m3fn with a scale per row", _find_fbgemm),
    "compressed-tensors": Method(
        "pack-quantized int4 and int8 per group or channel, int-quantized int8 per channel, "
        "float-quantized fp8, mxfp8, nvfp4 and mxfp4",
        _find_compressed_tensors,
    ),
    "gptq": Method("2, 4 or 8 bits, checkpoint_format gptq or gptq_v2", _find_gptq),
    "awq": Method("4 bits, version gemm", _find_awq),
    "auto-round": Method("packed as by GPTQ or AWQ; fp8, mxfp8, mxfp4, nvfp4", _find_auto_round),
}
