"""The type that llama.cpp's quantizer gives each tensor of a mix such as Q4_K_M.

Written from llama.cpp's src/llama-quant.cpp (tensor_get_category, tensor_allows_quantization,
tensor_type_fallback, llama_tensor_get_type_impl), for the mixes of MIXES without an importance
matrix. tests/tools/test_random_gguf.py compares both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import gguf
from gguf import GGMLQuantizationType as Type

Shape = tuple[int, ...]

MIXES = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8_0": Type.Q8_0, "q4_0": Type.Q4_0,
         "q5_1": Type.Q5_1, "mxfp4": Type.MXFP4, "q4_k_m": Type.Q4_K}  # fmt: skip
# For rows that are no whole number of blocks.
COARSER = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}
KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|ssm_conv1d|per_layer_model_proj|shortconv\.conv\.weight"
)
VALUES = re.compile(r"attn_(v|qkv|kv_b)\.weight")
DOWN = re.compile(r"blk\.(\d+)\.ffn_down")
MANY_VALUES = 8  # experts of a model whose keys and values get Q8_0 in a mix


def types_of(shapes: Mapping[str, Shape], mix: str) -> dict[str, Type]:
    """Return the type of every tensor by name. `shapes` are all tensors of a model in file order,
    rows last but one, columns last.
    """
    values = [name for name in shapes if VALUES.search(name)]
    layers = [int(match[1]) for match in map(re.compile(r"blk\.(\d+)\.").match, shapes) if match]
    num_layers = max(layers, default=0) + 1
    found = {}
    for name, shape in shapes.items():
        if name.endswith("tid2eid.weight"):
            found[name] = Type.I32
            continue
        if not is_quantized(name, shape):
            found[name] = Type.F32
            continue
        wanted = MIXES[mix]
        if mix == "mxfp4" and len(shape) < 3:
            wanted = Type.Q8_0
        if mix == "q4_k_m":
            wanted = _of_q4_k_m(name, shapes, values, num_layers)
        found[name] = _fitting(wanted, shape[-1])
    return found


def is_quantized(name: str, shape: Shape) -> bool:
    """Return False for tensors that stay float32 in every mix."""
    return prod(shape[:-1]) > 1 and name.endswith("weight") and not KEPT.search(name)


def _of_q4_k_m(name: str, shapes: Mapping[str, Shape], values: list[str], num_layers: int) -> Type:
    is_tied = "output.weight" not in shapes
    if name == "output.weight" or (is_tied and name == "token_embd.weight"):
        return Type.Q6_K if shapes[name][-1] % 256 == 0 else Type.Q8_0
    has_eight = any("_exps." in each and shape[0] == 8 for each, shape in shapes.items())
    if has_eight and re.search(r"attn_(v|qkv|kv_b|k)\.weight", name):
        return Type.Q8_0
    if name in values and _has_more_bits(values.index(name), len(values)):
        return Type.Q6_K
    if has_eight and name.endswith("attn_output.weight"):
        return Type.Q5_K
    if (down := DOWN.match(name)) and _has_more_bits(int(down[1]), num_layers):
        return Type.Q6_K
    return Type.Q4_K


def _has_more_bits(position: int, count: int) -> bool:
    """Return True for the first and last eighth, and every third between them."""
    eighth = count // 8
    return position < eighth or position >= 7 * count // 8 or (position - eighth) % 3 == 2


def _fitting(wanted: Type, num_columns: int) -> Type:
    for kind in (wanted, COARSER.get(wanted, wanted)):
        if num_columns % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            return kind
    return Type.F16
