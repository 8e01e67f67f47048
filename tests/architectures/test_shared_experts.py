"""Blocks with a shared expert: kernels compute it in decode steps, in both paths, and stand back
for everything that they do not know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from moe_infinity import MoE
from moe_infinity.architectures.adapters import CALL_ATTRIBUTE
from moe_infinity.architectures.block_search import find_shared_expert
from moe_infinity.architectures.model_parts import PackedLinear
from moe_infinity.architectures.trial import FellBack, Found
from moe_infinity.kernels.reference import Activation
from tests.architectures.changes import CHANGES
from tests.architectures.test_decoder_layers import (
    TOKENS,
    assert_close,
    logits_of,
    saved,
)
from tests.gguf_files import build
from tests.gguf_models import WIDE
from tools.convert_to_gguf import convert

pytestmark = [pytest.mark.arithmetic]


class Block(nn.Module):
    """The parts of a block of Qwen2-MoE, and a `combine` of their outputs."""

    def __init__(self, block: Any, combine: Callable[..., Tensor], **more: nn.Module) -> None:
        super().__init__()
        self.gate = block.gate
        self.experts = block.experts
        self.shared_expert = block.shared_expert
        self.combine = combine
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.view(-1, hidden_states.shape[-1])
        _, weights, index = self.gate(x)
        return self.combine(self, x, self.experts(x, index, weights)).view_as(hidden_states)


def plain_sum(block: Any, x: Tensor, out: Tensor) -> Tensor:
    return out + block.shared_expert(x)


def scaled_sum(block: Any, x: Tensor, out: Tensor) -> Tensor:
    return out + torch.sigmoid(block.scale(x)) * block.shared_expert(x)


@pytest.fixture(scope="module")
def block(tmp_path_factory) -> Any:
    folder = saved("Qwen2Moe", tmp_path_factory.mktemp("model"))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    block = model.model.layers[0].mlp
    setattr(block.experts, CALL_ATTRIBUTE, object())
    return block


@pytest.mark.parametrize(
    ("act_fn", "found"),
    [
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (transformers.activations.ReLUSquaredActivation(), "relu2"),
        (nn.ReLU(), None),
        (nn.Hardswish(), None),
        (nn.PReLU(), None),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_small", [False, True])
def test_activations_are_told_apart(block, act_fn, found, is_small):
    """Also with weights as small as those of a model that was not trained."""
    block = copy.deepcopy(block)
    block.shared_expert.act_fn = act_fn
    with torch.no_grad():
        for linear in block.shared_expert.children():
            if is_small and isinstance(linear, nn.Linear):
                linear.weight.mul_(0.05)
    verdict = find_shared_expert(block)
    if found is not None:
        assert verdict == Found(Activation(found))
    else:
        assert isinstance(verdict, FellBack)


def linear(rows: int, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(64, rows, bias=bias)


def test_other_blocks_run_their_own_code(block):
    silu = Found(Activation("silu"))
    scale, copy = linear(1), type(block.shared_expert)(block.shared_expert.config, 40)
    assert find_shared_expert(block) == silu
    assert find_shared_expert(Block(block, plain_sum)) == silu
    assert find_shared_expert(Block(block, scaled_sum, scale=scale)) == silu

    def is_left(combine: Callable[..., Tensor], **more: nn.Module) -> bool:
        return isinstance(find_shared_expert(Block(block, combine, **more)), FellBack)

    assert is_left(lambda b, x, out: out + 0.999 * b.shared_expert(x))
    assert is_left(lambda b, x, out: 0.999 * out + b.shared_expert(x))
    assert is_left(lambda b, x, out: out)
    assert is_left(lambda b, x, out: out + F.silu(b.scale(x)) * b.shared_expert(x), scale=scale)
    assert is_left(plain_sum, scale=scale)
    assert is_left(scaled_sum, scale=linear(1, bias=True))
    both = lambda b, x, out: out + b.scale(x).softmax(-1)[:, :1] * b.shared_expert(x)  # noqa: E731
    assert is_left(both, scale=linear(2))
    assert is_left(lambda b, x, out: plain_sum(b, x, out) + b.second(x), second=copy)
    assert find_shared_expert(Block(block, scaled_sum, scale=scale, other=linear(1))) == FellBack(
        "more than a router and experts follows attention: "
        "gate, experts, shared_expert, scale, other",
        has_run=True,
    )
    assert is_left(plain_sum, norm=nn.LayerNorm(64))
    biased = type(block.shared_expert)(block.shared_expert.config, 40)
    biased.up_proj = nn.Linear(64, 40)
    assert is_left(plain_sum, shared_expert=biased)
    narrow = type(block.shared_expert)(block.shared_expert.config, 8)  # less than a vector
    assert is_left(plain_sum, shared_expert=narrow)


def test_report_says_that_a_kernel_computes_it_until_it_is_changed(tmp_path):
    with MoE(saved("Qwen2Moe", tmp_path)) as moe:

        def own_code() -> dict[str, str | None]:
            paths = (count.taken for count in moe.report().paths)
            return {path.kind: path.reason for path in paths if path.reason is not None}

        assert own_code() == {}
        block = moe.model.model.layers[1].mlp
        with block.shared_expert.up_proj.register_forward_hook(lambda *_: None):
            assert own_code() == {"block": "a hook on Linear"}
        block.shared_expert_gate.weight = nn.Parameter(block.shared_expert_gate.weight.clone())
        assert own_code() == {"block": "it was changed after loading"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory) -> Path:
    """A GGUF file whose shared experts are packed in Q4_K and Q6_K."""
    folder = build(
        "qwen2_moe", tmp_path_factory.mktemp("packed"), **WIDE, shared_expert_intermediate_size=512
    )
    file = folder / "q4_k_m.gguf"
    convert(folder, file, "q4_k_m")
    return file


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_seqs", [1, 3])
@pytest.mark.parametrize("is_packed", [False, True])
def test_both_paths_give_the_same_bits(tmp_path, packed, calls, runs, is_packed, num_seqs, dtype):
    model = packed if is_packed else saved("Qwen2Moe", tmp_path)
    tokens = torch.arange(num_seqs * 20).view(num_seqs, 20) * 37 % 128
    options = {"dtype": dtype, "device": "cpu"}
    with MoE(model, exact=True, **options) as moe:
        stock = logits_of(moe.model, tokens)
    assert calls == []
    with MoE(model, host_memory="50%", **options) as moe:
        linear = moe.model.model.layers[1].mlp.shared_expert.down_proj
        assert isinstance(linear, PackedLinear) == is_packed
        calls.clear()  # those of trials
        expected = logits_of(moe.model, tokens)
        num_layers = len(moe.model.model.layers)
    assert calls == [num_seqs] * 15 * num_layers
    assert runs == []
    with MoE(model, **options) as moe:
        moe.preload()
        found = logits_of(moe.model, tokens)
    assert runs == [num_layers] * 15
    assert torch.equal(found, expected)
    difference = (found - stock).abs()
    if dtype == "float32":
        assert difference.max() < 1e-4 * stock.abs().max()
    else:  # a router may choose otherwise
        assert difference.mean() < 0.1 * stock.abs().mean()


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[tuple[Any, list[MoE]]]:
    """Stock's, and ours with half and all of the experts in memory."""
    folder = saved("Qwen2Moe", tmp_path_factory.mktemp("model"))
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with MoE(folder, host_memory="50%") as few, MoE(folder) as all_in_memory:
        all_in_memory.preload()
        yield stock, [few, all_in_memory]


MLP = ".shared_expert"
PARTS = ("", MLP, f"{MLP}.up_proj", f"{MLP}.down_proj", f"{MLP}.act_fn", f"{MLP}_gate")


@pytest.mark.sample(5)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_steps_follow_a_change_of_a_shared_expert(models, change, part):
    stock, ours = models
    name = f"model.layers.1.mlp{part}"
    if not CHANGES[change](stock.get_submodule(name)):
        pytest.skip("nothing to change")
    tokens = TOKENS[:1, :8]
    with ExitStack() as changed:
        for model in (stock, *(moe.model for moe in ours)):
            changed.enter_context(change(model.get_submodule(name)))
        expected = logits_of(stock, tokens)
        for moe in ours:
            found = logits_of(moe.model, tokens)
            assert (found - expected).abs().max() <= 1e-4 * expected.abs().max(), moe.config
    expected = logits_of(stock, tokens)
    for moe in ours:
        assert_close(logits_of(moe.model, tokens), expected)
        assert "was changed" not in str(moe.report())
