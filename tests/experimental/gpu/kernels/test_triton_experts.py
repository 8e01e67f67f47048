"""Experts read by pointer, Triton's kernels and their twin, against the definition in float64 with
weights of kernels/unpack.py.

Legend: T tokens, K experts per token, D model width, F expert width.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_infinity.experimental.gpu.device_table import DeviceTable
from moe_infinity.experimental.gpu.kernels import reference as slot_reference
from moe_infinity.experimental.gpu.kernels.slot_mlp import SlotMlp, slot_mlp
from moe_infinity.experts import ExpertKey, ParamSpec
from moe_infinity.kernels.activation import FUNCTIONS, Activation
from moe_infinity.layout import PLAIN, WeightLayout
from tests.kernels.slot_moe import slot_moe
from tests.kernels.stored_weights import StoredExperts, layout_of

pytest.importorskip("triton", reason="needs triton")
from moe_infinity.experimental.gpu import resolve as triton_resolve
from moe_infinity.experimental.gpu.kernels import experts as triton_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = [pytest.param(slot_reference, id="twin"), pytest.param(triton_experts, id="triton")]
EPS = {dtype: torch.finfo(dtype).eps for dtype in PLAIN.values()}
BLOCK_KINDS = ["ggml q8_0", "ggml q4_k", "ggml q6_k", "ggml mxfp4"]
KINDS = [
    *PLAIN,
    "int8",
    "int4 32",
    "int4 24",
    "int4 128",
    "int4 zeros 32",
    "int4 None",
    "fp8 blocks",
    "fp8 rows",
    "fp8 exponents",
    "mxfp4",
    "bf16 transposed",
    "f32 transposed",
    "gptq 32",
    "gptq 32 any",
    "gptq_v2 32",
    "gptq_v2 16 any",
    "awq 32",
    "awq 4",
    *BLOCK_KINDS,
]
SILU = Activation("silu")
OF_GPT_OSS = Activation("silu", alpha=1.702, shift=1.0, limit=7.0)
ACTIVATIONS = [
    *map(Activation, FUNCTIONS),
    OF_GPT_OSS,
    Activation("silu", limit=3.0),
    Activation("relu2", is_gated=False),
    Activation("silu", is_gated=False),
]

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """The interpreter runs them one after the other."""
    torch.manual_seed(0)
    if DEVICE == "cpu":
        monkeypatch.setattr(triton_experts, "UP_LOADS", 1024)
        monkeypatch.setattr(triton_experts, "MAX_ROWS", 64)
        monkeypatch.setattr(triton_resolve, "FILL_PROGRAMS", 2)


class Experts(StoredExperts):
    """Experts in slots, and routing to them."""

    def __init__(self, kind, width, expert_width, *, act=SILU, is_interleaved=False, **options):
        super().__init__(kind, width, expert_width, is_gated=act.is_gated, **options)
        *up, down = self.described
        mlp = slot_mlp(
            up,
            down,
            activation=act,
            is_interleaved=is_interleaved,
            biases=self.described_biases,
        )
        assert mlp is not None
        self.mlp, self.act, self.is_interleaved = mlp, act, is_interleaved

    def compute(self, kernels, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        device = DEVICE if kernels is triton_experts else "cpu"
        slots = self.slots.to(device)
        pointers_E = slots.data_ptr() + torch.arange(len(slots)) * slots.shape[1]
        given = (t.to(device) for t in (x_TD, index_TK, weights_TK, pointers_E))
        return slot_moe(kernels, self.mlp, *given).cpu()

    def largest_error(
        self, found_TD: Tensor, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor
    ) -> float:
        """As a share of the bound. A float32 sum of n values in chunks is off by less than
        (n / 8 + 40) eps of the sum of sizes: 40 for a chunk and the tree over threads. An error of
        what activations give reaches the output through |down|. No activation is steeper than 1.2,
        and each rounds less than 16 times. With several tokens weights and what activations give
        are rounded to the dtype of x.
        """
        exact_TD = torch.zeros(x_TD.shape, dtype=torch.float64)
        bound_TD = torch.zeros_like(exact_TD)
        eps = EPS[torch.float32]
        rounding = EPS[x_TD.dtype] if len(x_TD) > 1 else 0.0
        rounding_of_weights = 0.0 if self.mlp.gate.is_plain else rounding
        for t, k in torch.cartesian_prod(*map(torch.arange, index_TK.shape)).tolist():
            expert, share = int(index_TK[t, k]), weights_TK[t, k].double()
            if expert < 0:
                continue
            x, (up, down), (up_sizes, down_sizes), biases = (
                x_TD[t].double(),
                self.weights[expert],
                self.sizes[expert],
                [bias.double() for bias in self.biases[expert]],
            )
            if self.mlp.weighs_input:
                x, share = share * x, torch.ones(())
            bias = torch.cat(biases[:-1])
            inner = up.double() @ x + bias
            terms = up_sizes.double() @ x.abs() + bias.abs()
            share_of_terms = (len(x) / 8 + 40) * eps + rounding_of_weights
            hidden, bound = self._activated(inner, share_of_terms * terms)
            bound += rounding * hidden.abs()
            exact_TD[t] += share * (down.double() @ hidden + biases[-1])
            bound = down.double().abs() @ bound
            terms = down_sizes.double() @ hidden.abs() + biases[-1].abs()
            share_of_terms = (len(hidden) / 8 + 40) * eps + rounding_of_weights
            bound_TD[t] += share.abs() * (bound + share_of_terms * terms)
        bound_TD += EPS[found_TD.dtype] * exact_TD.abs()
        return ((found_TD.double() - exact_TD).abs() / bound_TD.clamp(min=1e-30)).max().item()

    def _activated(self, inner: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        def parts(t: Tensor) -> list[Tensor]:
            if self.is_interleaved:
                return [t[0::2], t[1::2]]
            return list(t.chunk(1 + self.act.is_gated))

        (gate, *ups), (gate_bound, *up_bounds) = parts(inner), parts(bound)
        size = gate.clamp(max=self.act.limit).abs()
        if self.act.function == "relu2":
            gate_bound, size = 2 * gate_bound * (size + gate_bound), size.square()
        bound = 1.2 * gate_bound + 16 * EPS[torch.float32] * size
        for up, up_bound in zip(ups, up_bounds, strict=True):
            up_size = up.clamp(-self.act.limit, self.act.limit).abs() + abs(self.act.shift)
            bound = (bound + EPS[torch.float32] * size) * up_size + size * up_bound
        return self.act(gate, *ups), bound


def routing(num_tokens: int, top_k: int, num_experts: int = 4) -> tuple[Tensor, Tensor]:
    index_TK = torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])
    return index_TK, torch.rand(num_tokens, top_k).softmax(dim=1)


def inputs(kind: str, num_tokens: int, width: int) -> Tensor:
    """Of several tokens in float32, unless weights are as they are: then what is packed is rounded
    no more than with one.
    """
    packed = torch.bfloat16 if num_tokens == 1 else torch.float32
    return torch.randn(num_tokens, width).to(PLAIN.get(kind.split()[0], packed))


@pytest.mark.sample(5)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_weight_computes_its_definition(kernels, kind, num_tokens):
    width = {"int4 24": 120, "int4 128": 128, "ggml q4_k": 512, "ggml q6_k": 256}.get(kind, 160)
    splits = kind in ("bf16", "int4 zeros 32")
    expert_width = {"int4 128": 128, "ggml q4_k": 256, "ggml q6_k": 256}.get(kind, 96)
    experts = Experts(kind, width, expert_width, splits=splits)
    x, (index, weights) = inputs(kind, num_tokens, width), routing(num_tokens, 2)
    found = experts.compute(kernels, x, index, weights)
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    assert experts.largest_error(found, x, index, weights) < 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_activations_are_their_definition(kernels, act):
    experts = Experts("f32", 40, 24, act=act)
    x, (index, weights) = 20 * torch.randn(3, 40), routing(3, 2)
    found = experts.compute(kernels, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("kind", ["mxfp4", "bf16", "bf16 transposed"])
def test_gpt_oss_has_biases_and_rows_of_gate_and_up_in_turn(kernels, kind):
    experts = Experts(kind, 64, 96, act=OF_GPT_OSS, is_interleaved=True, has_bias=True)
    x, (index, weights) = inputs(kind, 2, 64), routing(2, 4)
    found = experts.compute(kernels, x, index, weights.bfloat16())
    assert experts.largest_error(found, x, index, weights.bfloat16()) < 1


@pytest.mark.sample(5)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("kind", "width", "expert_width"),
    [("bf16", 200, 72), ("bf16", 33, 17), ("bf16 transposed", 33, 17), ("f16 transposed", 17, 17),
     ("f16", 1000, 8), ("int8", 36, 20), ("int4 None", 8, 8), ("int4 8", 72, 40),
     ("fp8 rows", 36, 20), ("f32", 1, 1), ("gptq 8", 24, 40), ("gptq 8 any", 24, 8),
     ("awq 8", 24, 40), ("awq 8", 8, 8)],
)  # fmt: skip
def test_rows_of_a_weight_may_have_any_length(kernels, kind, width, expert_width):
    experts = Experts(kind, width, expert_width)
    x, (index, weights) = inputs(kind, 2, width), routing(2, 3)
    found = experts.compute(kernels, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("scale", [2.0**-18, 2.0**28])
@pytest.mark.parametrize("kind", ["int4 32", "int8", "gptq 32", "awq 32", "mxfp4"])
def test_small_and_large_x_are_rounded_no_more_than_others(kind, scale):
    """What comes to `down` is about the square."""
    experts = Experts(kind, 64, 96)
    x, (index, weights) = scale * inputs("f32", 2, 64), routing(2, 3)
    found = experts.compute(triton_experts, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (8, 1), (1, 8), (3, 5), (8, 8)])
def test_any_number_of_tokens_and_experts(kernels, num_tokens, top_k):
    experts = Experts("bf16", 16, 16, num=9)
    x, (index, weights) = inputs("bf16", num_tokens, 16), routing(num_tokens, top_k, 9)
    index[0, 0] = index[-1, -1] = 0
    found = experts.compute(kernels, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "kind", ["bf16", "int8", "fp8 blocks", "int4 zeros 32", "mxfp4", "gptq 32", "gptq 32 any",
             "awq 32"],
)  # fmt: skip
def test_a_pair_without_an_expert_adds_nothing(kernels, kind):
    """Nothing is read at address 0: a kernel that does would end the test's process."""
    experts = Experts(kind, 64, 32, has_bias=True)
    x, (index, weights) = inputs(kind, 3, 64), routing(3, 2)
    index[0, 1] = -1
    index[2] = -1
    weights[2] = torch.nan  # what nobody computes is not multiplied by either
    found = experts.compute(kernels, x, index, weights)
    assert experts.largest_error(found[:2], x[:2], index[:2], weights[:2]) < 1
    assert (found[2] == 0).all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("act", [SILU, OF_GPT_OSS])
def test_weights_of_the_routing_may_scale_what_goes_in(kernels, act):
    experts = Experts("bf16", 40, 24, act=act)
    x, (index, weights) = inputs("bf16", 3, 40), routing(3, 2)
    index[0, 1], weights[0, 1] = -1, torch.nan
    experts.mlp = replace(experts.mlp, weighs_input=True)
    found = experts.compute(kernels, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1
    experts.mlp = replace(experts.mlp, weighs_input=False)
    assert experts.largest_error(found, x, index, weights) > 1


@pytest.mark.sample(4)
@pytest.mark.grid
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "kind",
    ["bf16", "int4 32", "fp8 blocks", "int8", "mxfp4", "bf16 transposed", "gptq 32 any",
     pytest.param("awq 32", marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_tolerance_rejects_what_is_wrong(kernels, kind):
    experts = Experts(kind, 64, 64, splits=True)
    x, (index, weights) = inputs(kind, 2, 64), routing(2, 3)

    def error() -> float:
        found = experts.compute(kernels, x, index, weights)
        return experts.largest_error(found, x, index, weights)

    assert error() < 1
    mlp = experts.mlp
    assert mlp.up is not None
    wrong: list[SlotMlp] = [replace(mlp, gate=mlp.up, up=mlp.gate), replace(mlp, gate=mlp.up)]
    wrong.append(replace(mlp, activation=Activation("gelu")))
    if (scale := mlp.up.weight.scale) is not None:
        for name in ("gate", "down"):
            matrix = getattr(mlp, name)
            other_scale = replace(matrix.weight, scale=scale)
            wrong.append(replace(mlp, **{name: replace(matrix, weight=other_scale)}))
    for experts.mlp in wrong:
        assert error() > 1
    experts.mlp = mlp
    found = experts.compute(kernels, x, index, weights)
    other, shifted = index.clone(), weights.roll(1, dims=1)
    other[1, 2] = 6 - other[1].sum()  # one pair gets the expert that the token has not
    for told in ((other, weights), (index, shifted)):
        assert experts.largest_error(found, x, *told) > 1


@pytest.mark.parametrize("kernels", KERNELS)
def test_every_float8_value_is_read(kernels):
    """Of 256 rows with one value each, beside zeros, times what a row of ones gives."""
    up, ones, numbers = torch.zeros(8, 256), torch.zeros(256, 4), torch.zeros(256, 4).byte()
    up[[0, 4], 0] = ones[:, 0] = 1
    numbers[:, 0] = torch.arange(256)
    stored = [up, ones, torch.ones(4), numbers]
    slot = torch.cat([t.view(torch.uint8).flatten() for t in stored])
    gate_up = WeightLayout.plain(ParamSpec("", (8, 256), "float32", 0))
    plain = WeightLayout.plain(ParamSpec("", (256, 4), "float32", 8192))
    parts = {
        "scale": ParamSpec("", (1, 1), "float32", 12288),
        "values": ParamSpec("", (256, 4), "float8_e4m3fn", 12304),
    }
    packed = layout_of("fp8", parts)
    experts = Experts("f32", 1, 1, num=1)
    experts.slots = slot[None]
    found = []
    for down in (plain, packed):
        mlp = slot_mlp([gate_up], down, activation=SILU)
        assert mlp is not None
        experts.mlp = mlp
        one = torch.zeros(1, 1, dtype=torch.int64)
        found.append(experts.compute(kernels, torch.ones(1, 256), one, torch.ones(1, 1))[0])
    expected = numbers[:, 0].view(torch.float8_e4m3fn).float() * found[0]
    torch.testing.assert_close(found[1], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["bf16", "int4 8", "f32", "bf16 transposed", "gptq 8", "awq 8"])
def test_tiles_of_a_gpu_compute_the_same(kind, monkeypatch):
    """Rows and columns of several tiles, the last ones not full."""
    monkeypatch.undo()
    experts = Experts(kind, 1096 if kind == "f32" else 72, 40)
    x, (index, weights) = inputs(kind, 1, experts.described[-1].shape[0]), routing(1, 2)
    assert triton_experts.tile_of(experts.mlp.gate, triton_experts.UP_LOADS, 4)["ROWS"] < 40
    found = experts.compute(triton_experts, x, index, weights)
    assert experts.largest_error(found, x, index, weights) < 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("num_slots", [1, 3, 6])
def test_a_step_gives_the_same_bits_whatever_is_cached(num_slots):
    experts = Experts("bf16", 48, 32, num=6)
    x, (index, weights) = inputs("bf16", 2, 48), routing(2, 3, 6)
    resident = experts.compute(triton_experts, x, index, weights)
    host = experts.slots.pin_memory() if DEVICE == "cuda" else experts.slots
    slots = torch.zeros(num_slots, host.shape[1], dtype=torch.uint8, device=DEVICE)
    table = DeviceTable(slots, num_layers=1, num_experts=6, max_pairs=6)
    table.upload_residency({}, {ExpertKey(0, e): host[e].data_ptr() for e in range(6)})
    x, index, weights = (t.to(DEVICE) for t in (x, index, weights))
    for _ in range(2):
        pointers = triton_resolve.resolve(table, 0, index)
        triton_resolve.fill(table, 6)
        found = slot_moe(triton_experts, experts.mlp, x, index, weights, pointers)
        assert torch.equal(found.cpu(), resident)


@pytest.mark.parametrize("group", [-1, 4])
def test_an_index_beyond_the_groups_is_the_nearest_group(group):
    """Where the host unpacks it is an error; a kernel can only stay inside the slot."""
    experts, found = Experts("gptq_v2 8 any", 32, 32, num=1), []
    x, (index, weights) = inputs("bf16", 1, 32), routing(1, 1, 1)
    matrix = experts.mlp.gate
    assert matrix.groups is not None
    groups = experts.slots[0, matrix.groups.offset :][: 4 * 32].view(torch.int32)
    for told in (min(max(group, 0), 3), group):
        groups[5] = told
        found.append(experts.compute(triton_experts, x, index, weights))
    assert torch.equal(*found)
