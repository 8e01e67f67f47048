"""Experts computed in one call against the plain way: weights of kernels/unpack.py in float32,
multiplied in float64.

Legend: P rows of all experts, D model width.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_infinity.experts import ParamSpec
from moe_infinity.kernels.cpu.experts import fused_experts
from moe_infinity.kernels.many_rows import RowPath
from moe_infinity.kernels.reference import FUNCTIONS, Activation
from moe_infinity.layout import PLAIN, WeightLayout
from tests.kernels.stored_weights import StoredExperts

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(3)]

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float16, torch.bfloat16)}
KINDS = [
    *PLAIN,
    "int8",
    "int4 32",
    "int4 64",
    "int4 zeros 32",
    "int4 None",
    "fp8 blocks",
    "fp8 rows",
    "mxfp4",
    "pairs",
    "nvfp4",
    "nvfp4_divided",
    "fp8 exponents",
    "gptq 32",
    "gptq_v2 64",
    "awq 32",
    "ggml q4_0",
    "ggml q5_1",
]
SILU = Activation("silu")
LIMITED = Activation("silu", alpha=1.5, shift=0.5, limit=3.0)
ACTIVATIONS = [
    Activation(function, is_gated) for function in FUNCTIONS for is_gated in (True, False)
]
ACTIVATIONS.append(LIMITED)


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


class Experts(StoredExperts):
    """Some experts in slots, and who computes them."""

    def __init__(self, kind, width, expert_width, *, act=SILU, is_interleaved=False, **options):
        super().__init__(kind, width, expert_width, is_gated=act.is_gated, **options)
        self.act, self.is_interleaved = act, is_interleaved
        self.fused = fused_experts(
            self.described[:-1],
            self.described[-1:],
            act,
            biases=self.described_biases,
            is_interleaved=is_interleaved,
        )

    def parts(self, outputs: Tensor) -> list[Tensor]:
        """Gate and up, of outputs [P, 2F]; or all."""
        if self.is_interleaved:
            return [outputs[:, 0::2], outputs[:, 1::2]]
        return list(outputs.chunk(1 + self.act.is_gated, 1))

    def compute(self, x_PD: Tensor, starts: list[int], order=(0, 1, 2, 3)) -> Tensor:
        assert self.fused is not None
        return self.fused(
            x_PD, starts, [self.slots[i].data_ptr() for i in order[: len(starts) - 1]]
        )

    def largest_error(self, found_PD: Tensor, x_PD: Tensor, starts: list[int]) -> float:
        """As a share of the bound: as in test_packed_cpu.py, for each product; an error of what
        activations give reaches the output through |down|. No activation here is steeper than 1.2,
        but the square, by its input; each rounds less than 8 times, and what is added to up once.
        """
        largest = 0.0
        for i in range(len(starts) - 1):
            rows = slice(starts[i], starts[i + 1])
            if starts[i] == starts[i + 1]:
                continue
            x, (up, down), (up_sizes, down_sizes), biases = (
                x_PD[rows].double(),
                self.weights[i],
                self.sizes[i],
                [bias.double() for bias in self.biases[i]],
            )
            up_bias = torch.cat(biases[:-1])
            inner = x @ up.double().t() + up_bias
            sizes = x.abs() @ up_sizes.double().t() + up_bias.abs()
            bound = (x.shape[1] / 8 + 16) * EPS[torch.float32] * sizes
            (gate, *ups), (gate_bound, *up_bounds) = self.parts(inner), self.parts(bound)
            hidden, size = self.act(gate, *ups), gate.abs()
            if self.act.function == "relu2":
                gate_bound, size = 2 * gate_bound * (size + gate_bound), size.square()
            bound = 1.2 * gate_bound + 8 * EPS[torch.float32] * size
            for up_out, up_bound in zip(ups, up_bounds, strict=True):
                up_size = up_out.abs() + abs(self.act.shift)
                bound = (bound + EPS[torch.float32] * size) * up_size + size * up_bound
            exact = hidden @ down.double().t() + biases[-1]
            bound = bound @ down.double().abs().t()
            steps = hidden.shape[1] / 8 + 16
            sizes = hidden.abs() @ down_sizes.double().t() + biases[-1].abs()
            bound += steps * EPS[torch.float32] * sizes
            bound += EPS[found_PD.dtype] * exact.abs()
            error = ((found_PD[rows].double() - exact).abs() / bound.clamp(min=1e-30)).max().item()
            largest = max(largest, error)
        return largest


STARTS = [0, 1, 3, 6, 11]  # experts of 1, 2, 3 and 5 rows
MANY = [0, 7, 7, 19, 60]  # of 7, 0, 12 and 41


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_each_row_gets_what_its_expert_gives(kind):
    width = 256 if "64" in kind else 160
    experts = Experts(kind, width, 192, splits=kind in ("bf16", "int4 zeros 32"))
    x = torch.randn(11, width).to(PLAIN.get(kind, torch.float32))
    found = experts.compute(x, STARTS)
    assert found.dtype == x.dtype
    assert experts.largest_error(found, x, STARTS) < 1
    x = torch.randn(60, width)
    assert experts.largest_error(experts.compute(x, MANY), x, MANY) < 1


@pytest.mark.parametrize("kind", ["mxfp4", pytest.param("bf16", marks=pytest.mark.slow)])
def test_gpt_oss_has_biases_and_rows_of_gate_and_up_in_turn(kind, monkeypatch):
    monkeypatch.setattr("moe_infinity.kernels.cpu.product.BLOCK_BYTES", 1 << 12)
    experts = Experts(kind, 160, 192, act=LIMITED, is_interleaved=True, has_bias=True)
    x = torch.randn(11, 160)
    found = experts.compute(x, STARTS)
    assert experts.largest_error(found, x, STARTS) < 1
    described, biases = (experts.described[:-1], experts.described[-1:]), experts.described_biases
    for told in (
        {"biases": biases},
        {"is_interleaved": True},
        {"is_interleaved": True, "biases": [biases[0], biases[0]]},
        {"is_interleaved": True, "biases": [biases[1], biases[1]]},
    ):
        experts.fused = fused_experts(*described, LIMITED, **told)
        assert experts.largest_error(experts.compute(x, STARTS), x, STARTS) > 1


@pytest.mark.parametrize(
    ("kind", "width", "is_read"), [("gptq 32", 128, True), ("gptq 32", 160, False),
                                   ("awq 32", 256, True), ("awq 32", 192, False)],
)  # fmt: skip
def test_biases_of_rows_that_two_blocks_compute_are_left_to_torch(
    kind, width, is_read, monkeypatch
):
    monkeypatch.setattr("moe_infinity.kernels.cpu.product.BLOCK_BYTES", 1 << 12)
    experts = Experts(kind, width, 256, act=LIMITED, is_interleaved=True, has_bias=True)
    assert (experts.fused is not None) == is_read
    if is_read:
        x = torch.randn(11, width)
        assert experts.largest_error(experts.compute(x, STARTS), x, STARTS) < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_biases_may_have_any_dtype(dtype):
    experts = Experts("f32", 40, 24, act=Activation("relu2", is_gated=False), has_bias=True)
    given = [(512 * torch.rand(size)).to(dtype) for size in (24, 40)]
    slot = torch.cat([experts.slots[0], *(t.view(torch.uint8) for t in given)])
    offsets = experts.slots.shape[1], experts.slots.shape[1] + given[0].nbytes
    biases = [
        ParamSpec("", tuple(t.shape), str(dtype)[6:], offset)
        for offset, t in zip(offsets, given, strict=True)
    ]
    up, down = experts.described
    fused = fused_experts([up], [down], experts.act, biases=biases)
    assert fused is not None
    found = fused(torch.zeros(1, 40), [0, 1], [slot.data_ptr()])[0]
    expected = experts.weights[0][1] @ given[0].float().square() + given[1].float()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_activations_are_their_definition(act, is_interleaved):
    experts = Experts("f32", 40, 27, act=act, is_interleaved=is_interleaved and act.is_gated)
    for size in (0.1, 20):
        x = size * torch.randn(11, 40)
        assert experts.largest_error(experts.compute(x, STARTS), x, STARTS) < 1


@pytest.mark.parametrize(
    "act", [LIMITED, Activation("relu2", is_gated=False), Activation("gelu", is_gated=False)]
)
def test_what_is_no_number_stays_none(act):
    experts = Experts("f32", 40, 24, act=act)
    x = torch.randn(3, 40)
    x[1, 5] = torch.nan
    found = experts.compute(x, [0, 3])
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("kind", "width", "expert_width"),
    [
        ("bf16", 200, 72),
        ("bf16", 33, 17),
        ("f16", 1000, 40),
        ("int8", 200, 72),
        ("int8", 1000, 40),
        ("gptq 16", 144, 80),
        ("gptq 144 any", 144, 144),
        ("awq 16", 144, 208),
    ],
)
def test_rows_of_a_weight_may_have_any_length(kind, width, expert_width):
    experts = Experts(kind, width, expert_width)
    for starts in (STARTS, MANY):
        x = torch.randn(starts[-1], width).bfloat16()
        assert experts.largest_error(experts.compute(x, starts), x, starts) < 1


@pytest.mark.parametrize("kind", ["bf16", "gptq 32", "awq 32"])
def test_many_blocks_give_what_one_thread_gives_bit_for_bit(kind, monkeypatch):
    """And rows give the same alone, in other company, and as one row that all experts share."""
    monkeypatch.setattr("moe_infinity.kernels.cpu.product.BLOCK_BYTES", 1 << 10)
    experts = Experts(kind, 160, 192)
    x = torch.randn(1, 160).expand(4, -1)
    shared = experts.compute(x, [0, 1, 2, 3, 4])
    assert torch.equal(experts.compute(x.clone(), [0, 1, 2, 3, 4]), shared)
    torch.set_num_threads(1)
    assert torch.equal(
        experts.compute(torch.cat([x, x]), [0, 2, 4, 6, 8]), shared.repeat_interleave(2, 0)
    )
    for i in range(4):
        assert torch.equal(experts.compute(x[:1], [0, 1], (i,)), shared[i : i + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_alone_and_among_any_number_of_others(kind, monkeypatch):
    """Whether few rows of x or many are multiplied with one row of a weight or several at once, in
    whatever block that row is.
    """
    width = 256 if "64" in kind else 160
    experts = Experts(kind, width, 192)
    x = torch.randn(29, width)
    alone = torch.cat([experts.compute(x[i : i + 1], [0, 1]) for i in range(29)])
    for num_rows in (*range(2, 10), 12, 13, 29):
        assert torch.equal(experts.compute(x[:num_rows], [0, num_rows]), alone[:num_rows]), num_rows
    monkeypatch.setattr("moe_infinity.kernels.cpu.product.BLOCK_BYTES", 1 << 9)
    experts.fused = fused_experts(experts.described[:-1], experts.described[-1:], SILU)
    assert torch.equal(experts.compute(x, [0, 29]), alone)


@pytest.mark.parametrize("path", [RowPath.FEW, RowPath.PANELS])
@pytest.mark.parametrize("calls", [[[0], [1], [2], [3]], [[3, 0], [1, 2]], [[2, 3], [], [0, 1]]])
def test_experts_may_arrive_in_any_order_and_in_any_number_of_calls(calls, path):
    experts = Experts("bf16", 160, 192)
    x = torch.randn(20, 160)
    tokens = torch.randint(20, (MANY[-1],))
    places = [slot.data_ptr() for slot in experts.slots]
    assert experts.fused is not None
    expected = experts.fused(x[tokens], MANY, places, path)
    rows = experts.fused.begin(x, MANY[-1], tokens, path=path)
    tables = tables_of(experts.fused.parts, *[experts.slots] * len(experts.fused.parts))
    for call in calls:
        at = [tables[each].ctypes.data for each in call]
        rows.compute([MANY[each] for each in call], [MANY[each + 1] for each in call], at)
    assert torch.equal(rows.out_PD, expected)


@pytest.mark.parametrize("kind", ["int4 32", "gptq 32", "awq 32"])
def test_the_tolerance_rejects_swapped_experts_and_rows_and_gate_for_up(kind):
    experts = Experts(kind, 160, 192, splits=True)
    x = torch.randn(11, 160)
    found = experts.compute(x, STARTS)
    other = experts.compute(x, STARTS, (1, 0, 2, 3))
    rows = found[[0, 2, 1, *range(3, 11)]]
    gate, up, down = experts.described
    experts.fused = fused_experts([up, gate], [down], SILU)
    for wrong in (other, rows, experts.compute(x, STARTS)):
        assert experts.largest_error(wrong, x, STARTS) > 1


def test_two_callers_at_once_compute_as_if_alone():
    experts = Experts("int8", 160, 192)
    x = torch.randn(11, 160)
    alone = experts.compute(x, STARTS)
    with ThreadPoolExecutor(2) as callers:
        results = list(callers.map(lambda _: experts.compute(x, STARTS), range(200)))
    assert all(torch.equal(result, alone) for result in results)


def test_what_kernels_do_not_read_is_refused():
    gate_up, down = Experts("bf16", 160, 192).described
    other = WeightLayout("bf16", (384, 160), ParamSpec("", (384, 160), "float32", 0))
    for up in (other, down):
        assert fused_experts([up], [down], SILU) is None
    assert fused_experts([gate_up], [gate_up], SILU) is None
    assert Experts("bf16", 8, 8).fused is None
    ungated = Activation(is_gated=False)
    up, square = Experts("bf16", 160, 160, act=ungated).described
    assert fused_experts([up], [square], ungated) is not None
    assert fused_experts([up], [replace(square, is_transposed=True)], ungated) is None
    biased = Experts("bf16", 160, 192, has_bias=True)
    up_bias, down_bias = biased.described_biases
    for wrong in ([up_bias], [up_bias, replace(down_bias, dtype="float16")]):
        assert fused_experts([gate_up], [down], SILU, biases=wrong) is None
    assert Experts("gptq 32 any", 160, 192).fused is None
    assert Experts("awq 16", 160, 48).fused is None  # fewer rows than a block has
    words = Experts("gptq 32", 160, 192, has_bias=True)
    assert fused_experts(words.described[:1], words.described[1:], SILU) is not None
    assert words.fused is None
    whole = [replace(part, dtype="int32") for part in (up_bias, down_bias)]
    assert fused_experts([gate_up], [down], SILU, biases=whole) is None


def tables_of(parts: Sequence[ParamSpec], *slots: Tensor) -> NDArray[np.int64]:
    """[experts, parts]: the address of each part in its own memory [experts, bytes]."""
    addresses = [
        [own[i].data_ptr() + part.offset for part, own in zip(parts, slots, strict=True)]
        for i in range(len(slots[0]))
    ]
    return np.array(addresses, np.int64)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("kind", ["ggml q4_k", "mxfp4", "bf16"])
@pytest.mark.parametrize("path", [*RowPath])
def test_each_part_may_lie_in_other_memory(path, kind, splits):
    """As in a mapped file. Whatever else lies there is spoilt."""
    experts = Experts(kind, 256, 256, splits=splits, has_bias=True)
    x_PD, starts = torch.randn(5, 256), [0, 2, 2, 4, 5]
    assert experts.fused is not None
    slots_at = [slot.data_ptr() for slot in experts.slots]
    expected = experts.fused(x_PD, starts, slots_at, path)
    apart = []
    for part in experts.fused.parts:
        memory = torch.full_like(experts.slots, 255)
        bytes_of = slice(part.offset, part.offset + part.num_bytes)
        memory[:, bytes_of] = experts.slots[:, bytes_of]
        apart.append(memory)
    tables = tables_of(experts.fused.parts, *apart)
    rows = experts.fused.begin(x_PD, len(x_PD), path=path)
    rows.compute(starts[:-1], starts[1:], [table.ctypes.data for table in tables])
    assert torch.equal(rows.out_PD.to(x_PD.dtype), expected)
    biases = experts.biases[0]
    assert len(experts.fused.parts) == len({memory.data_ptr() for memory in apart})
    assert len(biases) == 2 + splits
