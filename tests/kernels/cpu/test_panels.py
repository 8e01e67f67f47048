"""Products of many rows: panels, and weights widened to bfloat16, against the weights of
kernels/unpack.py, multiplied in float64.

Legend: T tokens, R rows (outputs), C columns (inputs) of a weight.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from moe_infinity.experts import ExpertLayout, ParamSpec
from moe_infinity.formats.methods import find_format
from moe_infinity.kernels import many_rows
from moe_infinity.kernels.cpu import product, widened
from moe_infinity.kernels.cpu.compiler import multiplies_bfloat16
from moe_infinity.kernels.cpu.experts import fused_experts
from moe_infinity.kernels.cpu.linear import FusedLinear, fused_linear
from moe_infinity.kernels.many_rows import MOST_TOKENS, RowPath
from moe_infinity.kernels.reference import Activation
from moe_infinity.kernels.unpack import BLOCKS
from moe_infinity.layout import PLAIN, PackedWeight
from tests.kernels.stored_weights import HALVES, StoredExperts, layout_of, make_weight

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(3)]

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
    *(f"ggml {name}" for name in HALVES),
]
# Each kind is compiled anew. A panel is decoded by the loaders of test_blocks.py and
# test_experts.py, where the fast suite has every kind; here it has one of each way to scale.
FAST = (
    "f32", "bf16", "int4 32", "int4 zeros 32", "int4 None", "fp8 blocks", "mxfp4", "nvfp4_divided",
    "ggml q8_0", "ggml q6_k", "ggml iq1_s",
)  # fmt: skip
EVERY_KIND = [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in KINDS]
EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16)}
MANY = MOST_TOKENS + 1
FEW = RowPath.FEW


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def matrices(monkeypatch):
    """A processor that multiplies matrices of bfloat16. torch does so here in any case."""
    monkeypatch.setattr(many_rows, "has_products_of_matrices", lambda: True)


@pytest.fixture
def pairs(monkeypatch):
    """A processor that multiplies pairs of bfloat16, and no matrices."""
    if not multiplies_bfloat16():
        pytest.skip("this processor does not multiply bfloat16")
    monkeypatch.setattr(many_rows, "has_products_of_matrices", lambda: False)


@pytest.fixture
def no_bfloat16(monkeypatch):
    for name in ("has_products_of_matrices", "multiplies_bfloat16"):
        monkeypatch.setattr(many_rows, name, lambda: False)


def stored(kind: str, rows: int, columns: int) -> tuple[PackedWeight, Tensor]:
    """A weight in memory of its own, and what it is in float32."""
    if kind == "fp8 blocks":
        rows += -rows % 16
    parts, weight, _ = make_weight(kind, rows, columns)
    memory, specs = in_memory(parts)
    return PackedWeight(layout_of(kind, specs), memory), weight


def in_memory(parts: dict[str, Tensor]) -> tuple[Tensor, dict[str, ParamSpec]]:
    """The parts of a weight one after the other, and where they are."""
    layout = ExpertLayout.of(
        {role: (tuple(t.shape), str(t.dtype)[6:]) for role, t in parts.items()}
    )
    memory = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    specs: dict[str, ParamSpec] = {}
    for spec in layout.params:
        memory[spec.offset :][: spec.num_bytes] = parts[spec.name].view(torch.uint8).flatten()
        specs[spec.name] = spec
    return memory, specs


def linear_of(*weights: PackedWeight) -> FusedLinear:
    fused = fused_linear(weights)
    assert fused is not None
    return fused


def assert_product(found_TR: Tensor, x_TC: Tensor, weight_RC: Tensor, eps: float) -> None:
    """Within what rounding every value and product allows. Zeros and minima are subtracted after
    scaling, from values of up to twice the largest one.
    """
    exact = x_TC.double() @ weight_RC.double().t()
    size = x_TC.double().abs().sum(1, keepdim=True) * weight_RC.double().abs().amax(1)
    assert ((found_TR.double() - exact).abs() < 4 * eps * size).all()


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize(("rows", "columns"), [(37, 512), (16, 2304), (3, 256)])
def test_panels_multiply_any_number_of_rows_and_tokens(kind, rows, columns, no_bfloat16):
    weight, wide = stored(kind, rows, columns)
    fused = linear_of(weight)
    for num_tokens in (MANY, 96, 97, 203):
        x = torch.randn(num_tokens, columns)
        assert_product(fused(x), x, wide, EPS[torch.float32])
    with pytest.raises(AssertionError):
        assert_product(fused(x).roll(1, 1), x, wide, EPS[torch.float32])


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize(("rows", "columns"), [(37, 512), (16, 4352), (3, 256)])
def test_panels_of_bfloat16_multiply_weights_that_are_rounded_once(kind, rows, columns, pairs):
    weight, wide = stored(kind, rows, columns)
    fused = linear_of(weight)
    for num_tokens in (MANY, 96, 97, 203):
        x = torch.randn(num_tokens, columns).bfloat16()
        found = fused(x)
        assert found.dtype == torch.float32
        assert_product(found, x, wide, EPS[torch.bfloat16] / 4)  # half a last place
        if fused._in_half_panels is not fused._in_panels and kind == "bf16":
            assert_product(found, x, wide, EPS[torch.float32])
    with pytest.raises(AssertionError):
        assert_product(found.roll(1, 1), x, wide, EPS[torch.bfloat16] / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["bf16", "int4 zeros 32", "ggml q4_k", "ggml q6_k", "ggml q8_0"])
def test_a_row_and_token_have_the_same_bits_in_any_panel(kind, dtype, monkeypatch):
    monkeypatch.setattr(many_rows, "has_products_of_matrices", lambda: False)
    weight, _ = stored(kind, 37, 512)
    x = torch.randn(203, 512).to(dtype)
    together = linear_of(weight)(x)
    few = linear_of(weight)(x[:MOST_TOKENS])
    if kind != "bf16":  # which has the same bits on some processors
        assert not torch.equal(few, together[:MOST_TOKENS]), "scales are applied first"
    monkeypatch.setattr(product, "BLOCK_BYTES", 1)  # every row is a block
    fused = linear_of(weight)
    assert torch.equal(fused(x), together)
    for num_tokens in (*range(MANY, MANY + 7), 97, 150):
        assert torch.equal(fused(x[:num_tokens]), together[:num_tokens])


@pytest.mark.parametrize("columns", [480, 2112, 2144])
@pytest.mark.parametrize("kind", ["ggml q4_0", "ggml mxfp4", "ggml q8_0", "mxfp4", "int4 zeros 32"])
def test_the_last_step_of_a_row_may_overlap_in_panels_of_bfloat16(kind, columns, pairs):
    weight, wide = stored(kind, 5, columns)
    fused = linear_of(weight)
    assert fused._in_half_panels is not fused._in_panels
    for num_tokens in (MANY, 131):
        x = torch.randn(num_tokens, columns).bfloat16()
        assert_product(fused(x), x, wide, EPS[torch.bfloat16] / 4)


@pytest.mark.parametrize("columns", [480, 1088, 1184])
@pytest.mark.parametrize("kind", ["ggml q4_0", "ggml mxfp4", "ggml q8_0", "mxfp4", "int4 zeros 32"])
def test_the_last_step_of_a_row_may_overlap_the_one_before(kind, columns, no_bfloat16):
    """Blocks of 32 are read four at a time, and a panel has 1024 columns: of gpt-oss it is 2880. A
    step alone in the last panel, and one beside others.
    """
    weight, wide = stored(kind, 5, columns)
    fused = linear_of(weight)
    assert fused._in_panels is not fused._few
    for num_tokens in (MANY, 131):
        x = torch.randn(num_tokens, columns)
        assert_product(fused(x), x, wide, EPS[torch.float32])


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize(("rows", "columns"), [(37, 512), (5, 480)])
def test_widening_gives_the_unpacked_weight_rounded_once(kind, rows, columns):
    num_weights = BLOCKS[kind[5:]][0] if kind.startswith("ggml") else 64 if "64" in kind else 32
    if columns % num_weights:
        columns = 768
    weight, wide = stored(kind, rows, columns)
    specs = [*weight.layout.parts.values()]
    table = torch.tensor([weight.memory.data_ptr() + spec.offset for spec in specs])
    widening = widened.Widening.of([weight.layout], specs)
    assert widening is not None
    pieces = widening.pieces(1 << 20)
    parts = []
    for piece in pieces:  # the memory of a thread has what was multiplied last
        widening.multiply(piece, table.data_ptr(), torch.ones(1, columns).bfloat16())
        num_rows = piece.last - piece.first
        parts.append(widened._memory(num_rows * columns).view(num_rows, columns).clone())
    found = torch.cat(parts)
    rounding = EPS[torch.bfloat16] / 2 * wide.abs() + 8 * EPS[torch.float32] * wide.abs().max()
    assert ((found.float() - wide).abs() <= rounding).all()
    assert (found == wide.bfloat16()).float().mean() > 0.99


@pytest.mark.parametrize("columns", [400, 464, 480])
def test_a_row_that_ends_within_a_block_is_not_widened_with_the_scale_of_another(columns):
    parts, wide, _ = make_weight("fp8 blocks", 32, columns)
    memory, specs = in_memory(parts)
    config = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    weight_format = find_format(config).weights[0]
    layout = weight_format.layout_of(specs, is_transposed=False)
    in_slot = [*layout.parts.values()]
    widening = widened.Widening.of([layout], in_slot)
    if widening is None:
        assert columns % 32, "only what ends within a block is left to panels"
        return
    table = torch.tensor([memory.data_ptr() + spec.offset for spec in in_slot])
    (piece,) = widening.pieces(1 << 20)
    widening.multiply(piece, table.data_ptr(), torch.ones(1, columns).bfloat16())
    assert torch.equal(widened._memory(32 * columns).view(32, columns), wide.bfloat16())


def test_widened_weights_multiply_what_inference_mode_makes(matrices):
    weight, wide = stored("ggml q8_0", 37, 512)
    with torch.inference_mode():
        x = torch.randn(MANY, 512).bfloat16()
        found = linear_of(weight)(x)
    assert_product(found, x, wide, EPS[torch.bfloat16])


@pytest.mark.parametrize("num_bytes", [1, 40_000, 1 << 20])
def test_pieces_of_a_weight_are_all_of_it_once(num_bytes, matrices, monkeypatch):
    monkeypatch.setattr(product, "BLOCK_BYTES", 2_000)
    monkeypatch.setattr(widened, "PIECE_BYTES", num_bytes)
    made = [stored(kind, rows, 512) for kind, rows in (("ggml q4_k", 50), ("ggml q6_k", 23))]
    fused = linear_of(*(weight for weight, _ in made))
    x = torch.randn(MANY, 512).bfloat16()
    found = fused(x)
    assert found.dtype == torch.bfloat16
    bias = torch.randn(23).bfloat16()
    torch.testing.assert_close(fused(x, [None, bias])[:, :50], found[:, :50])
    last = torch.nn.functional.linear(x, made[1][1].bfloat16(), bias)
    torch.testing.assert_close(fused(x, [None, bias])[:, 50:], last)
    wide = torch.cat([wide for _, wide in made]).bfloat16()
    exact = x.double() @ wide.double().t()
    bound = 2 * EPS[torch.bfloat16] * (exact.abs() + exact.square().mean().sqrt() / 50)
    assert ((found.double() - exact).abs() <= bound).all()
    assert fused(x[:MOST_TOKENS]).dtype == torch.float32


def test_threads_to_come_have_as_many_of_torchs_as_before(matrices):
    weight, _ = stored("ggml q8_0", 37, 512)
    before = torch.get_num_threads()
    linear_of(weight)(torch.randn(MANY, 512).bfloat16())
    with ThreadPoolExecutor(1) as new:
        assert new.submit(torch.get_num_threads).result() == torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("num_tokens", "dtype", "mean_rows", "by_matrices", "by_pairs", "without"),
    [
        (64, torch.bfloat16, 100.0, FEW, FEW, FEW),
        (65, torch.bfloat16, 100.0, RowPath.WIDENED, RowPath.HALF_PANELS, RowPath.PANELS),
        (600, torch.bfloat16, 20.0, RowPath.HALF_PANELS, RowPath.HALF_PANELS, RowPath.PANELS),
        (600, torch.bfloat16, 5.0, RowPath.HALF_PANELS, RowPath.HALF_PANELS, FEW),
        (600, torch.bfloat16, 4.0, FEW, FEW, FEW),
        (600, torch.float32, 100.0, RowPath.PANELS, RowPath.PANELS, RowPath.PANELS),
        (600, torch.float16, 5.0, FEW, FEW, FEW),
    ],
)
def test_the_path_depends_on_the_pass_and_the_processor(
    num_tokens, dtype, mean_rows, by_matrices, by_pairs, without, monkeypatch
):
    processors = (True, True, by_matrices), (False, True, by_pairs), (False, False, without)
    for has_matrices, has_pairs, expected in processors:
        monkeypatch.setattr(many_rows, "has_products_of_matrices", lambda has=has_matrices: has)
        monkeypatch.setattr(many_rows, "multiplies_bfloat16", lambda has=has_pairs: has)
        assert many_rows.row_path(num_tokens, dtype, mean_rows) is expected


ACTIVATIONS = [
    Activation("silu"),
    Activation("gelu", is_gated=False),
    Activation("silu", limit=3.0),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["bf16", "mxfp4", "ggml q4_k", "ggml q8_0", "int4 32"])
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("path", [RowPath.PANELS, RowPath.HALF_PANELS, RowPath.WIDENED])
def test_experts_are_as_near_as_torch_in_bfloat16(path, act, kind, threads, matrices, monkeypatch):
    """With biases, and rows of gate and up in turn where the limit is that of gpt-oss."""
    for module in ("experts", "linear", "widened"):
        monkeypatch.setattr(f"moe_infinity.kernels.cpu.{module}.num_threads", lambda: threads)
    is_interleaved = act.limit == 3.0
    made = StoredExperts(kind, 256, 256, is_gated=act.is_gated, has_bias=is_interleaved)
    fused = fused_experts(
        made.described[:1], made.described[1:], act,
        biases=made.described_biases, is_interleaved=is_interleaved,
    )  # fmt: skip
    assert fused is not None
    assert (path in fused.in_panels) == (
        path is RowPath.PANELS or (path is RowPath.HALF_PANELS and multiplies_bfloat16())
    )
    x = torch.randn(80, 256).bfloat16()
    starts = [0, 17, 17, 30, 80]
    found = fused(x, starts, [slot.data_ptr() for slot in made.slots], path)
    assert found.dtype == torch.bfloat16
    errors = torch.zeros(2, dtype=torch.float64)
    for i in range(4):
        rows = slice(starts[i], starts[i + 1])
        exact = mlp(made, i, x[rows].double(), act, is_interleaved=is_interleaved)
        stock = mlp(made, i, x[rows], act, is_interleaved=is_interleaved)
        for k, one in enumerate((found[rows], stock)):
            errors[k] += (one.double() - exact).square().sum()
    ours, stocks = errors.sqrt().tolist()
    assert ours < 1.1 * stocks
    assert ours > 0


def mlp(
    made: StoredExperts, i: int, x_RD: Tensor, act: Activation, *, is_interleaved: bool
) -> Tensor:
    """Expert i in the dtype of x, as transformers computes it."""
    up, down = (weight.to(x_RD.dtype) for weight in made.weights[i])
    up_bias, down_bias = (bias.to(x_RD.dtype) for bias in made.biases[i])
    hidden = torch.nn.functional.linear(x_RD, up, up_bias)
    parts = [hidden]
    if act.is_gated:
        parts = [hidden[:, 0::2], hidden[:, 1::2]] if is_interleaved else [*hidden.chunk(2, 1)]
    return torch.nn.functional.linear(act(*parts), down, down_bias)
