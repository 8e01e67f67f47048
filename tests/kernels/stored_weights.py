"""Random weights of every kind, and experts made of them as they lie in slots."""

from __future__ import annotations

import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor

from moe_infinity.experts import ExpertLayout, ParamSpec
from moe_infinity.formats.float_formats import NVFP4, NVFP4_PACKED, mxfp4_format
from moe_infinity.formats.methods import PACKED_BY_US, find_format
from moe_infinity.kernels import unpack
from moe_infinity.kernels.unpack import BLOCKS, blocks_layout
from moe_infinity.layout import PLAIN, WORDS, WeightLayout

HALVES = {  # where a block of GGML's has its float16 numbers
    "q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q2_k": (80, 82),
    "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,), "iq4_nl": (0,), "iq4_xs": (0,),
    "mxfp4": (), "nvfp4": (), "tq2_0": (64,), "iq1_s": (0,), "iq1_m": (), "iq2_xxs": (0,),
    "iq2_xs": (0,), "iq2_s": (0,), "iq3_xxs": (0,), "iq3_s": (0,),
}  # fmt: skip


FP4_FORMATS = {
    "pairs": mxfp4_format("_packed", "_scale"), "nvfp4": NVFP4, "nvfp4_divided": NVFP4_PACKED
}  # fmt: skip


def layout_of(kind: str, parts: dict[str, ParamSpec]) -> WeightLayout:
    """Of a weight of this kind whose parts lie there."""
    name, *options = kind.split()
    if name in PLAIN:
        return WeightLayout.plain(parts["values"], is_transposed=options == ["transposed"])
    if name == "ggml":
        shape = parts["values"].shape
        columns = shape[1] // BLOCKS[options[0]][1] * BLOCKS[options[0]][0]
        return blocks_layout(options[0], (shape[0], columns), parts["values"])
    if name in FP4_FORMATS:
        return FP4_FORMATS[name].layout_of(parts, is_transposed=False)
    if name in PACKED_BY_US:
        return PACKED_BY_US[name].layout_of(parts, is_transposed=False)
    group = 0 if name == "mxfp4" else int(options[0])
    config = {"bits": 4, "group_size": group, "checkpoint_format": name}
    config["quant_method"] = name.removesuffix("_v2")
    config["desc_act"] = "any" in options
    (weight_format,) = find_format(config).weights
    return weight_format.layout_of(parts, is_transposed=False)


def make_weight(kind: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Its parts; the weight; and the size at which its values are rounded: beyond |w| where zeros
    are subtracted later.
    """
    name, *options = kind.split()
    if name in PLAIN:
        weight = torch.randn(rows, columns).to(PLAIN[name]) / columns**0.5
        stored = weight.t().contiguous() if options == ["transposed"] else weight
        return {"values": stored}, weight.float(), weight.float().abs()
    if name == "int8":
        bytes_RC = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
        scales = (torch.rand(rows, 1) / 1000).half()
        weight = bytes_RC.float() * scales.float()
        return {"values": bytes_RC, "scale": scales}, weight, weight.abs()
    if name == "fp8":
        grid = (rows, 1) if options == ["rows"] else (-(-rows // 16), -(-columns // 32))
        numbers = torch.randint(0, 0x58, (rows, columns)) + 128 * torch.randint(0, 2, (rows, 1))
        bytes_RC = numbers.to(torch.uint8).view(torch.float8_e4m3fn)
        scales, block = torch.rand(grid) / 50, (1, columns) if options == ["rows"] else (16, 32)
        if options == ["exponents"]:
            scales = torch.randint(115, 122, grid).to(torch.uint8)
        weight = unpack.fp8(bytes_RC, scales, block, torch.float32)
        return {"values": bytes_RC, "scale": scales}, weight, weight.abs()
    if name == "mxfp4":
        blocks = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(112, 122, blocks.shape[:2]).to(torch.uint8)
        weight = unpack.mxfp4(blocks, exponents, torch.float32).t()
        return {"values": blocks, "scale": exponents}, weight, weight.abs()
    if name in FP4_FORMATS:
        return _pairs(name, rows, columns)
    if name == "ggml":
        values = ggml_blocks(options[0], rows, columns)
        return {"values": values}, *_unpacked(options[0], values)
    if name in WORDS:
        return _words(name, rows, columns, options)
    group = columns if options[-1] == "None" else int(options[-1])
    parts = {"values": torch.randint(-(2**31), 2**31, (rows, columns // 8), dtype=torch.int32)}
    parts["scale"] = ((torch.rand(rows, columns // group) + 0.1) / 200).bfloat16()
    if "zeros" in options:
        parts["zeros"] = parts["values"][: -(-rows // 8), : columns // group].clone()
    floats = parts | {"scale": parts["scale"].float()}
    weight = unpack.int_rows(floats, (1, group), torch.float32)
    return parts, weight, 31 * parts["scale"].float().repeat_interleave(group, 1)


def _pairs(name: str, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Random bytes, with exponents of every 32 columns or numbers of every 16 and a global one."""
    parts = {"values": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)}
    if name == "pairs":
        parts["scale"] = torch.randint(112, 122, (rows, columns // 32)).to(torch.uint8)
    else:
        parts["scale"] = (torch.rand(rows, columns // 16) * 400 + 1).to(torch.float8_e4m3fn)
        parts["global_scale"] = torch.tensor([1e-4 if name == "nvfp4" else 1e4])
    weight = FP4_FORMATS[name].unpack(parts, None, torch.float32)
    return parts, weight, weight.abs()


def ggml_blocks(name: str, rows: int, columns: int) -> Tensor:
    """[R, bytes of a row]: random numbers of every size; scales of a block are near 0.01."""
    num_weights, num_bytes = BLOCKS[name]
    blocks = torch.randint(0, 256, (rows, columns // num_weights, num_bytes), dtype=torch.uint8)
    if name == "mxfp4":
        blocks[..., 0] = torch.randint(112, 122, blocks.shape[:2]).to(torch.uint8)
    if name == "iq1_m":  # the upper bits of a float16, the rest of which is in other bytes
        blocks[..., 55] = blocks[..., 55] & 0x0F | 0x20
    for offset in HALVES[name]:
        scales = (torch.rand(*blocks.shape[:2], 1) + 0.1) / 100
        blocks[..., offset : offset + 2] = scales.half().view(torch.uint8)
    return blocks.view(rows, -1)


def _unpacked(name: str, values: Tensor) -> tuple[Tensor, Tensor]:
    """As gguf has it; and the size at which kernels round: they subtract minima and zero points, of
    up to twice the largest value, later.
    """
    found = quants.dequantize(values.numpy(), GGMLQuantizationType[name.upper()])
    weight = torch.from_numpy(found)
    num_weights = BLOCKS[name][0]
    largest = weight.abs().view(len(weight), -1, num_weights).amax(-1)
    return weight, 3 * largest.repeat_interleave(num_weights, 1)


def _words(
    name: str, rows: int, columns: int, options: list[str]
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """gptq or awq; the first option is the length of a group. With "any" columns of gptq are in any
    order.
    """

    def words(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)

    group, num_groups = int(options[0]), columns // int(options[0])
    index = torch.arange(num_groups, dtype=torch.int32).repeat_interleave(group)
    values = (columns, rows // 8) if name == "awq" else (columns // 8, rows)
    parts = {"values": words(*values), "zeros": words(num_groups, rows // 8)}
    parts["scale"] = ((torch.rand(num_groups, rows) + 0.1) / 200).half()
    if "any" in options:
        parts["groups"] = index = index[torch.randperm(columns)]
    floats = parts | {"scale": parts["scale"].float()}
    if name == "awq":
        weight = unpack.awq(floats, torch.float32)
    else:
        weight = unpack.gptq(floats, (1, group), torch.float32, adds_one_to_zeros=name == "gptq")
    return parts, weight, 31 * floats["scale"].t()[:, index.long()]


class StoredExperts:
    """Some experts in slots, and their weights: `up` one above the other, then down."""

    def __init__(
        self, kind, width, expert_width, *, num=4, is_gated=True, splits=False, has_bias=False
    ):
        up_rows = 2 * expert_width if is_gated else expert_width
        shapes = [(expert_width, width)] * 2 if splits else [(up_rows, width)]
        shapes.append((width, expert_width))
        made = [[make_weight(kind, *shape) for shape in shapes] for _ in range(num)]
        self.biases = [[torch.randn(r).bfloat16() * has_bias for r, _ in shapes] for _ in made]
        named = [
            {f"{i} {role}": t for i, (parts, _, _) in enumerate(one) for role, t in parts.items()}
            | ({f"{i} bias": bias for i, bias in enumerate(biases)} if has_bias else {})
            for one, biases in zip(made, self.biases, strict=True)
        ]
        self.layout = ExpertLayout.of(
            {name: (tuple(t.shape), str(t.dtype)[6:]) for name, t in named[0].items()}
        )
        self.slots = torch.empty(num, self.layout.slot_bytes, dtype=torch.uint8)
        for slot, parts in zip(self.slots, named, strict=True):
            for spec in self.layout.params:
                slot[spec.offset :][: spec.num_bytes] = parts[spec.name].view(torch.uint8).flatten()
        self.weights = [(torch.cat([w for _, w, _ in one[:-1]]), one[-1][1]) for one in made]
        self.sizes = [(torch.cat([s for _, _, s in one[:-1]]), one[-1][2]) for one in made]
        stored: list[dict[str, ParamSpec]] = [{} for _ in shapes]
        for spec in self.layout.params:
            i, role = spec.name.split(" ")
            stored[int(i)][role] = spec
        self.described_biases = [parts.pop("bias") for parts in stored] if has_bias else []
        self.described = [layout_of(kind, parts) for parts in stored]
