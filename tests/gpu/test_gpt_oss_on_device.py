"""gpt-oss as it is published, experts of MXFP4 with biases, in steps that a fake device decides."""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping

from moe_infinity import MoE
from moe_infinity.architectures.trial import FellBack, Found
from moe_infinity.checkpoint.headers import Extent, Headers, StoredTensor
from moe_infinity.checkpoint.plan import Plan, contents_of, plan_experts
from moe_infinity.engine.expert_kernels import fused_layer, slot_layer
from moe_infinity.formats.methods import find_format
from moe_infinity.gpu import engine
from moe_infinity.gpu.device_steps import DeviceSteps
from moe_infinity.gpu.kernels import kernels_for
from moe_infinity.gpu.kernels.packed_matrix import PackedMatrix, any_matrix
from moe_infinity.kernels.reference import Activation
from moe_infinity.kernels.triton import reference
from moe_infinity.kernels.triton.slot_mlp import LOAD_BYTES, Matrix, SlotMlp
from tests.closeness import distance, logits_of_steps
from tests.gpu.fast_device import CACHES, experts_of, on_device
from tests.kernels.triton.slot_experts import REFERENCE, slot_moe
from tests.on_device import LONG_PROMPT, PROMPT, greedy
from tests.quantization_configs import MXFP4
from tests.quantized_checkpoints import GPT_OSS, build

pytestmark = pytest.mark.arithmetic

ROWS, TOP_K = 2, 3
IDS = torch.cat([PROMPT, LONG_PROMPT[:, :16]], dim=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = build("mxfp4", tmp_path_factory.mktemp("gpt_oss") / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.endswith("gate_up_proj_bias"):
            tensors[name] *= 25  # so that the limit is reached
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def computed(monkeypatch):
    """Rows of every step the device decided."""
    found: list[int] = []
    run_layer = DeviceSteps.run_layer

    def noted(self: DeviceSteps, moe_layer_idx: int, *args: Any) -> Tensor:
        found.append(moe_layer_idx)
        return run_layer(self, moe_layer_idx, *args)

    monkeypatch.setattr(DeviceSteps, "run_layer", noted)
    return found


@pytest.fixture(scope="module", params=CACHES)
def cache(request):
    return request.param


@pytest.fixture(scope="module")
def expected(folder, cache):
    """With all experts resident."""
    with on_device(folder, "100%") as moe:
        return greedy(moe, **cache), greedy(moe, LONG_PROMPT, **cache)


@pytest.mark.sample(2)
@pytest.mark.parametrize("device_memory", ["7%", "40%"])  # 1, 6 experts
def test_no_budget_changes_a_token(folder, expected, computed, device_memory, cache):
    with on_device(folder, device_memory) as moe:
        for _ in range(2):
            assert torch.equal(greedy(moe, **cache), expected[0])
            assert torch.equal(greedy(moe, LONG_PROMPT, **cache), expected[1])
            moe.check_invariants()
        decode = moe.report().decode
        assert decode.steps == 2 * 2 * 15
        assert decode.lookups == decode.steps * ROWS * TOP_K
        assert decode.misses > 0
    assert len(computed) == decode.steps * ROWS


# Against transformers


def stock_logits(folder: Path, ids: Tensor) -> Tensor:
    unpacked = transformers.Mxfp4Config(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=unpacked, experts_implementation="eager"
    ).float()
    return logits_of_steps(model, ids, PROMPT.shape[1])


def swap(mlp: SlotMlp) -> SlotMlp:
    assert mlp.up is not None
    return replace(mlp, gate=mlp.up, up=mlp.gate)


def without_bias(name: str) -> Any:
    def change(mlp: SlotMlp) -> SlotMlp:
        return replace(mlp, **{name: replace(getattr(mlp, name), bias=None)})

    return change


def with_activation(**changed: float) -> Any:
    return lambda mlp: replace(mlp, activation=replace(mlp.activation, **changed))


WRONG = {
    "gate and up swapped": swap,
    "halves in place of turns": lambda mlp: replace(
        mlp,
        gate=replace(mlp.gate, row_step=1),
        up=replace(mlp.up, row_step=1, first_row=mlp.up.num_rows),
    ),
    "no bias of gate": without_bias("gate"),
    "no bias of up": without_bias("up"),
    "no bias of down": without_bias("down"),
    "another alpha": with_activation(alpha=1.6),
    "no limit": with_activation(limit=math.inf),
    "nothing added to up": with_activation(shift=0.0),
}


def test_logits_are_those_of_transformers_and_what_is_wrong_is_seen(folder, monkeypatch):
    """In float32 both, so that they differ by the order of sums alone: 3e-5 of the largest logit
    (measured 1e-6); the smallest of the mistakes, the other alpha, changes 3e-3.
    """
    stock = stock_logits(folder, IDS)
    compute_pairs = reference.compute_pairs

    def found() -> float:
        with on_device(folder, "40%", dtype="float32") as moe:
            found = logits_of_steps(moe.model, IDS, PROMPT.shape[1])
        return distance(found, stock)

    assert found() < 3e-5
    monkeypatch.setattr(engine, "disagreement", lambda *_, **__: None)  # it sees most of them
    for change in WRONG.values():
        monkeypatch.setattr(
            reference,
            "compute_pairs",
            lambda mlp, *args, c=change: compute_pairs(c(mlp), *args),
        )
        assert found() > 1e-3, change

    sum_pairs = reference.sum_pairs

    def exchanged(mlp: SlotMlp, out_PD: Tensor, index_TK: Tensor, *more: Any) -> Tensor:
        return sum_pairs(
            mlp, out_PD.view(*index_TK.shape, -1).flip(1).flatten(0, 1), index_TK, *more
        )

    monkeypatch.setattr(reference, "compute_pairs", compute_pairs)
    monkeypatch.setattr(reference, "sum_pairs", exchanged)
    assert found() > 1e-3


# What kernels are given


def headers_of(model: Any) -> Headers:
    """Of the published checkpoint: experts in blocks of 32 values of 4 bits, with scales."""
    found: dict[str, StoredTensor] = {}

    def add(name: str, dtype: str, *shape: int) -> None:
        extent = Extent(Path("model.safetensors"), 0, prod(shape) * (2 if dtype == "BF16" else 1))
        found[name] = StoredTensor(name, dtype, shape, extent)

    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            num_experts, columns, rows = tensor.shape
            add(f"{name}_blocks", "U8", num_experts, rows, columns // 32, 16)
            add(f"{name}_scales", "U8", num_experts, rows, columns // 32)
        else:
            add(name, "BF16", *tensor.shape)
    return Headers(found, 0)


def plan_of(config: Any, *, is_packed: bool = True) -> Plan:
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(config).bfloat16()
    for layer in model.model.layers:
        layer.mlp.experts.alpha, layer.mlp.experts.limit = 1.5, 6.0
    headers = headers_of(model)
    if not is_packed:
        headers = Headers(
            {n: StoredTensor(n, "BF16", tuple(t.shape), Extent(Path("m"), 0, 2 * t.numel()))
             for n, t in model.state_dict().items()}, 0
        )  # fmt: skip
    packing = find_format(MXFP4) if is_packed else None
    return plan_experts(model, contents_of(headers, packing, get_model_conversion_mapping(model)))


def parts_of(matrix: Matrix) -> list[Any]:
    return [*matrix.weight.parts.values(), *([matrix.bias] if matrix.bias else [])]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "num_experts"),
    [(24, 32), (36, 128)],
    ids=["20b", "120b"],
)
def test_published_sizes_are_described(layers, num_experts):
    config = transformers.GptOssConfig(num_hidden_layers=layers, num_local_experts=num_experts)
    plan = plan_of(config)
    assert (len(plan.layers), plan.top_k) == (layers, 4)
    for layer, recipes in zip(plan.layers, plan.recipes, strict=True):
        described = slot_layer(layer, recipes, any_matrix)
        assert isinstance(described, Found)
        mlp = described.path
        assert mlp.up is not None
        assert isinstance(fused_layer(layer, recipes), Found)
        assert mlp.activation == Activation("silu", alpha=1.5, shift=1.0, limit=6.0)  # the module's
        assert (mlp.gate.first_row, mlp.up.first_row, mlp.gate.row_step) == (0, 1, 2)
        for matrix in (mlp.gate, mlp.up, mlp.down):
            assert isinstance(matrix, PackedMatrix)
            assert (matrix.kind, matrix.num_rows, matrix.num_columns) == ("mxfp4", 2880, 2880)
            assert (matrix.chunk, matrix.num_scale_columns) == (32, 90)
            assert len(parts_of(matrix)) == 3
            assert all(part.offset % LOAD_BYTES == 0 for part in parts_of(matrix))
        stored = 3 * 2880 * 2880 * 17 // 32 + 3 * 2880 * 2
        assert stored <= mlp.num_bytes <= recipes.layout.slot_bytes < stored + 1000


def test_weights_that_are_not_packed_are_read_transposed():
    config = transformers.GptOssConfig(**GPT_OSS)
    plan = plan_of(config, is_packed=False)
    described = slot_layer(plan.layers[0], plan.recipes[0])
    assert isinstance(described, Found)
    mlp = described.path
    assert mlp.up is not None
    for half, first in ((mlp.gate, 0), (mlp.up, 1)):
        assert (half.kind, half.first_row, half.row_step) == ("bf16", first, 2)
        assert (half.row_stride, half.column_stride) == (1, 2 * config.intermediate_size)
    assert (mlp.down.row_stride, mlp.down.column_stride) == (1, config.hidden_size)
    assert isinstance(fused_layer(plan.layers[0], plan.recipes[0]), FellBack)


def test_packed_on_load_they_are_read_too(tmp_path):
    """Gate and up in turn, in the rows of any kind."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**GPT_OSS | {"initializer_range": 0.2})
    transformers.GptOssForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    found = []
    for device_memory in ("100%", "7%"):
        with on_device(tmp_path, device_memory, expert_dtype="int8", dtype="float32") as moe:
            cache = transformers.StaticCache(moe.model.config, max_cache_len=IDS.shape[1])
            found.append(logits_of_steps(moe.model, IDS, PROMPT.shape[1], cache))
    assert torch.equal(found[0], found[1])
    with MoE(tmp_path, device="cpu", expert_dtype="int8", dtype="float32") as moe:
        assert distance(logits_of_steps(moe.model, IDS, PROMPT.shape[1]), found[0]) < 3e-5


@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the slots of a fake device are on the CPU")
def test_tritons_kernel_agrees_with_its_reference_on_a_layer(folder):
    pytest.importorskip("triton", reason="needs triton")
    triton_pairs = kernels_for(torch.device("cuda")).pairs
    torch.manual_seed(0)
    with on_device(folder, "100%") as moe:
        greedy(moe, LONG_PROMPT)
        (mlp, *_) = experts_of(moe).device_steps._mlps
        slots: Any = moe.engine.tiers[0].slots
        resident = sorted(moe.engine.tiers[0].table.resident_slots().items())
        at = [slots.address_of(slot) for key, slot in resident if key.moe_layer_idx == 0][:TOP_K]
        x_TD, weights_TK = 8 * torch.randn(1, 64), torch.rand(1, TOP_K)
        arguments = mlp, x_TD, torch.arange(TOP_K)[None], weights_TK, torch.tensor(at)
        expected = slot_moe(REFERENCE, *arguments)
        found = slot_moe(triton_pairs, *arguments)
        other = slot_moe(REFERENCE, swap(mlp), *arguments[1:])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert (other - expected).abs().max() > 0.1 * expected.abs().max()
