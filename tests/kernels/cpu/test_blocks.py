"""Products with weights in GGML's blocks against gguf's own dequantize, in float64.

Legend: T tokens, R rows (outputs), C columns (inputs) of a weight.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.cpu.experts import fused_experts
from moe_infinity.kernels.cpu.linear import fused_linear
from moe_infinity.kernels.reference import Activation
from moe_infinity.kernels.unpack import BLOCKS, blocks_layout, row_bytes
from moe_infinity.layout import PackedWeight
from tests.kernels.stored_weights import HALVES, ggml_blocks

pytestmark = [pytest.mark.arithmetic]

READ = [*HALVES]  # by kernels
WRITTEN = ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4"]  # by gguf
TOLERANCE = 1e-5  # of the largest output


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def dequantized(name: str, values: Tensor) -> Tensor:
    kind = gguf.GGMLQuantizationType[name.upper()]
    return torch.from_numpy(gguf.quants.dequantize(values.numpy(), kind))


def packed(name: str, values: Tensor) -> PackedWeight:
    num_weights, num_bytes = BLOCKS[name]
    shape = len(values), values.shape[1] // num_bytes * num_weights
    spec = ParamSpec("weight", tuple(values.shape), "uint8", 0)
    return PackedWeight(blocks_layout(name, shape, spec), values)


def product(x_TC: Tensor, *weights: PackedWeight | Tensor) -> Tensor:
    fused = fused_linear(weights)
    assert fused is not None
    return fused(x_TC)


def check(found: Tensor, x_TC: Tensor, weight_RC: Tensor) -> None:
    expected = x_TC.double() @ weight_RC.double().t()
    assert (found.double() - expected).abs().max() < TOLERANCE * expected.abs().max()


def test_the_table_of_blocks_is_that_of_gguf():
    for name, sizes in BLOCKS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]] == sizes


@pytest.mark.grid
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize(("rows", "columns"), [(37, 512), (8, 256), (3, 2304)])
def test_a_product_is_that_with_the_unpacked_weight(name, rows, columns):
    values = ggml_blocks(name, rows, columns)
    for num_tokens in (1, 2, 5, 29):
        x = torch.randn(num_tokens, columns)
        check(product(x, packed(name, values)), x, dequantized(name, values))


@pytest.mark.parametrize("name", [name for name in READ if BLOCKS[name][0] == 32])
@pytest.mark.parametrize("columns", [128, 160, 224, 480])
def test_a_row_may_have_any_number_of_blocks(name, columns):
    values = ggml_blocks(name, 5, columns)
    for num_tokens in (1, 7):
        x = torch.randn(num_tokens, columns)
        check(product(x, packed(name, values)), x, dequantized(name, values))


@pytest.mark.parametrize("name", WRITTEN)
def test_what_gguf_has_quantized_is_multiplied(name):
    weight = (torch.randn(19, 384) / 20).numpy()
    values = torch.from_numpy(gguf.quants.quantize(weight, gguf.GGMLQuantizationType[name.upper()]))
    x = torch.randn(3, 384)
    check(product(x, packed(name, values)), x, dequantized(name, values))


@pytest.mark.parametrize("name", READ)
def test_every_column_has_its_place(name):
    """Unit vectors give the weight itself, with the minima of its block to be rounded."""
    values = ggml_blocks(name, 2, 512)
    weight = dequantized(name, values)
    found = product(torch.eye(512), packed(name, values)).t()
    torch.testing.assert_close(found, weight, rtol=0, atol=float(2e-6 * weight.abs().max()))


@pytest.mark.parametrize("name", READ)
def test_a_row_and_token_have_the_same_bits_alone_and_with_others(name):
    values = ggml_blocks(name, 11, 512)
    x = torch.randn(29, 512)
    alone = torch.cat([product(x[t : t + 1], packed(name, values)) for t in range(29)])
    for num_tokens in (2, 3, 4, 5, 6, 7, 11, 12, 29):
        assert torch.equal(product(x[:num_tokens], packed(name, values)), alone[:num_tokens])
    one = product(x, packed(name, values[7:8].clone()))
    assert torch.equal(one, alone[:, 7:8])


@pytest.mark.parametrize("name", READ)
def test_neighbours_of_a_weight_in_memory_do_not_matter(name):
    """Nothing outside its bytes is read into a product."""
    values = ggml_blocks(name, 3, 512)
    x = torch.randn(2, 512)
    expected = product(x, packed(name, values))
    size = values.numel()
    for filler in (0, 255):
        memory = torch.full((size + 256,), filler, dtype=torch.uint8)
        inside = memory[128 : 128 + size].view(values.shape)
        inside[:] = values
        assert torch.equal(product(x, packed(name, inside)), expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "kinds",
    [
        ("q4_k", "q4_k", "q6_k"),
        ("q4_0", "q4_0", "q8_0"),
        ("mxfp4",) * 3,
        ("q4_k", "q5_0", "q2_k"),
        ("iq2_xxs", "iq2_xxs", "iq3_s"),
    ],
)
def test_experts_are_computed_in_their_slots_whatever_kinds_they_mix(kinds, threads, monkeypatch):
    monkeypatch.setattr("moe_infinity.kernels.cpu.experts.num_threads", lambda: threads)
    shapes = [(512, 256), (512, 256), (256, 512)]
    values = [ggml_blocks(kind, *shape) for kind, shape in zip(kinds, shapes, strict=True)]
    slot = torch.cat([one.flatten() for one in values])
    offsets = [0, values[0].numel(), values[0].numel() + values[1].numel()]
    gate, up, down = (
        packed(kind, one).layout.moved(offset)
        for kind, one, offset in zip(kinds, values, offsets, strict=True)
    )
    fused = fused_experts([gate, up], [down], Activation("silu"))
    assert fused is not None
    weights = [dequantized(*each).double() for each in zip(kinds, values, strict=True)]
    for num_tokens in (1, 11):
        x = torch.randn(num_tokens, 256)
        found = fused(x, [0, num_tokens], [slot.data_ptr()])
        hidden = torch.nn.functional.silu(x.double() @ weights[0].t()) * (
            x.double() @ weights[1].t()
        )
        check(found, hidden, weights[2])


def test_one_expert_for_each_of_a_tokens_rows_may_mix_kinds():
    """Then all experts read one row of x, in two arrangements."""
    kinds = ("q4_k", "q6_k")
    slots = [[ggml_blocks(kind, 512, 256) for kind in kinds] for _ in range(3)]
    down = ggml_blocks("q8_0", 256, 512)
    memory = [torch.cat([*(one.flatten() for one in slot), down.flatten()]) for slot in slots]
    first, second = (packed(kind, one) for kind, one in zip(kinds, slots[0], strict=True))
    last = packed("q8_0", down).layout.moved(first.nbytes + second.nbytes)
    layouts = [first.layout, second.layout.moved(first.nbytes)]
    fused = fused_experts(layouts, [last], Activation("silu"))
    assert fused is not None
    x = torch.randn(1, 256)
    rows = fused(x.expand(3, -1), [0, 1, 2, 3], [each.data_ptr() for each in memory])
    for row, each in zip(rows, memory, strict=True):
        assert torch.equal(row, fused(x, [0, 1], [each.data_ptr()])[0])


def test_linear_layers_with_the_same_input_may_mix_kinds():
    """Queries and keys in q4_k and values in q6_k, as files of the mix Q4_K_M have them."""
    kinds = ("q4_k", "q4_k", "q6_k", "q8_0")
    values = [ggml_blocks(kind, rows, 512) for kind, rows in zip(kinds, (64, 9, 9, 5), strict=True)]
    plain = torch.randn(7, 512).bfloat16()
    weights = [packed(*each) for each in zip(kinds, values, strict=True)]
    for num_tokens in (1, 5, 29):
        x = torch.randn(num_tokens, 512)
        together = product(x, *weights, plain)
        apart = [product(x, one) for one in weights]
        assert torch.equal(together, torch.cat([*apart, product(x, plain)], 1))


@pytest.mark.parametrize("name", BLOCKS)
def test_unpacking_gives_the_bits_of_gguf(name):
    num_weights, _ = BLOCKS[name]
    values = torch.randint(0, 120, (6, row_bytes(name, 4 * num_weights)), dtype=torch.uint8)
    weight = packed(name, values)
    found = weight.unpacked(torch.float32).numpy()
    kind = gguf.GGMLQuantizationType[name.upper()]
    expected = gguf.quants.dequantize(values.numpy(), kind)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
    assert weight.unpacked(torch.bfloat16).dtype == torch.bfloat16


def test_kinds_without_a_kernel_are_left_to_the_caller():
    values = torch.zeros(4, row_bytes("tq1_0", 512), dtype=torch.uint8)
    assert fused_linear([packed("tq1_0", values)]) is None
    assert fused_linear([packed("q4_0", torch.zeros(4, 36, dtype=torch.uint8))]) is None
