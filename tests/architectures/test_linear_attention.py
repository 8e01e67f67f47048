"""Decode steps of layers with linear attention: the kernel gives what their code gives, and stands
back where it cannot know that.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from moe_infinity import MoE
from moe_infinity.architectures import linear_attention
from moe_infinity.architectures.attention_inputs import CACHE_NAMES
from moe_infinity.architectures.linear_attention import find_delta_rule, is_delta_rule
from moe_infinity.architectures.model_parts import LINEAR_ATTENTION, ReorderedLinear
from moe_infinity.architectures.trial import FellBack, Found
from moe_infinity.kernels.cpu.decoder_steps import DecoderSteps
from moe_infinity.kernels.cpu.delta_states import DeltaStates, SpareStates
from tests.prefixes.tiny_models import TEXT, save_tiny

pytestmark = pytest.mark.arithmetic

NAMES = ("qwen3_next", "qwen3_5_moe")
NUM_NEW = 6


@pytest.fixture(scope="module", params=NAMES)
def folder(request: Any, tmp_path_factory: Any) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture
def moe(folder: Path) -> Iterator[MoE]:
    with MoE(folder, dtype="float32") as moe:
        yield moe


@pytest.fixture
def own_layer(folder: Path) -> Iterator[Any]:
    """A layer that runs its own code."""
    with MoE(folder, dtype="float32", exact=True) as moe:
        yield layers_of(moe)[0]


@pytest.fixture
def steps(monkeypatch: Any) -> list[Any]:
    """The layers of a cache to which the kernel adds a token, as they come."""
    layers: list[Any] = []
    stock = DeltaStates.add_token

    def counted(self: DeltaStates, cache_layer: Any, states: Any) -> None:
        stock(self, cache_layer, states)
        layers.append(cache_layer)

    monkeypatch.setattr(DeltaStates, "add_token", counted)
    return layers


def layers_of(moe: MoE) -> list[Any]:
    """The layers with linear attention."""
    modules = moe.model.modules()
    return [module for module in modules if LINEAR_ATTENTION in dict(module.named_children())]


def attentions_of(moe: MoE) -> list[Any]:
    return [getattr(layer, LINEAR_ATTENTION) for layer in layers_of(moe)]


def logits(moe: MoE, lengths: tuple[int, ...] = (9,), **arguments: Any) -> Tensor:
    """Logits of the new tokens behind prompts of these lengths."""
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.tensor(TEXT[row * 40 : row * 40 + length])
        mask[row, longest - length :] = 1
    out = moe.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=NUM_NEW,
        min_new_tokens=NUM_NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **arguments,
    )
    return torch.stack(out.logits)


def close(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-3 * wanted.abs().max())


@pytest.mark.sample(2)
@pytest.mark.parametrize("lengths", [(9,), (1,), (12, 5, 9)])
def test_tokens_are_those_of_the_modules_own_code(folder, moe, steps, lengths):
    found = logits(moe, lengths)
    assert len(steps) == (NUM_NEW - 1) * len(attentions_of(moe)) > 0
    with MoE(folder, dtype="float32", exact=True) as exact:
        wanted = logits(exact, lengths)
    assert len(steps) == (NUM_NEW - 1) * len(attentions_of(moe))
    assert close(found, wanted)
    paths = [path for path in moe.report().paths if "DecoderLayer" in path.taken.class_name]
    assert [path.taken.reason for path in paths] == [None]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_goes_through_the_kernel(folder, steps, dtype):
    with MoE(folder, dtype=dtype) as moe:
        found = logits(moe)
        assert len(steps) == (NUM_NEW - 1) * len(attentions_of(moe))
    assert found.isfinite().all()


def test_beams_and_several_answers_go_through_the_kernel(folder, moe, steps):
    def scores(model: MoE) -> Tensor:
        out = model.generate(
            input_ids=torch.tensor([TEXT[:9]]),
            max_new_tokens=NUM_NEW,
            do_sample=False,
            num_beams=3,
            num_return_sequences=2,
            output_scores=True,
            return_dict_in_generate=True,
        )
        found: Tensor = out.sequences_scores
        return found

    found = scores(moe)
    assert steps
    with MoE(folder, dtype="float32", exact=True) as exact:
        torch.testing.assert_close(found, scores(exact), rtol=1e-3, atol=0)


def _double_norm(module: Any) -> None:
    module.norm.weight.data.mul_(2)


def _own_decay(module: Any) -> None:
    module.A_log.data.add_(1)


def _hook(module: Any) -> None:
    module.norm.register_forward_hook(lambda *args: args[2] * 2)


def _other_norm(module: Any) -> None:
    norm = module.norm
    module.norm = nn.ModuleList()
    module.norm.forward = lambda x, gate: 2 * norm(x, gate)


def _other_taps(module: Any) -> None:
    module.conv1d.weight.data.mul_(2)


@pytest.mark.sample(3)
@pytest.mark.parametrize("change", [_double_norm, _own_decay, _hook, _other_norm, _other_taps])
def test_a_changed_module_computes_what_it_became(folder, moe, steps, change):
    before = logits(moe)
    with MoE(folder, dtype="float32", exact=True) as exact:
        for each in (moe, exact):
            change(attentions_of(each)[0])
        del steps[:]
        found, wanted = logits(moe), logits(exact)
    assert not close(found, before)
    assert close(found, wanted)
    num_changed = change is not _other_taps  # which the kernel reads where they are
    assert len(steps) == (NUM_NEW - 1) * (len(attentions_of(moe)) - num_changed)
    changed = ("it was changed after loading", "a hook on ")
    paths = [each for each in moe.report().paths if each.taken.kind == "layer"]
    reasons = [each.taken.reason or "" for each in paths for _ in range(each.count)]
    assert sum(reason.startswith(changed) for reason in reasons) == num_changed


def test_another_convolution_in_torch_is_called(folder, moe, steps, monkeypatch):
    stock = nn.functional.conv1d
    monkeypatch.setattr(nn.functional, "conv1d", lambda *args, **kwargs: 2 * stock(*args, **kwargs))
    with MoE(folder, dtype="float32", exact=True) as exact:
        del steps[:]  # of trials
        assert close(logits(moe), logits(exact))
    assert not steps


def test_hooks_on_linear_layers_are_called(moe, steps):
    seen = []
    attentions_of(moe)[0].out_proj.register_forward_hook(lambda *args: seen.append(args))
    logits(moe)
    assert len(seen) == NUM_NEW
    assert len(steps) == (NUM_NEW - 1) * (len(attentions_of(moe)) - 1)


@pytest.fixture
def runs(monkeypatch: Any) -> list[int]:
    """How many layers each call of the resident path computes."""
    counts: list[int] = []
    stock = DecoderSteps.run

    def counted(self: DecoderSteps, *args: Any) -> Any:
        outs, routings = stock(self, *args)
        counts.append(len(outs))
        return outs, routings

    monkeypatch.setattr(DecoderSteps, "run", counted)
    return counts


def test_all_layers_are_computed_in_one_call_also_behind_a_batch(moe, runs):
    """The masks of a batch differ from layer to layer, those of one sequence do not."""
    num_layers = moe.model.config.get_text_config().num_hidden_layers
    logits(moe)
    assert runs == [num_layers] * (NUM_NEW - 1)
    logits(moe, (12, 5, 9))
    del runs[:]
    logits(moe)
    assert runs == [num_layers] * (NUM_NEW - 1)


def test_a_layer_whose_input_somebody_changed_goes_on_from_its_last_state(folder, moe, runs):
    """It was computed ahead for another input, and so were those after it."""

    before = logits(moe)
    with MoE(folder, dtype="float32", exact=True) as exact:
        for each in (moe, exact):
            layer = layers_of(each)[1]
            layer.register_forward_pre_hook(lambda layer, args: (args[0] + 1, *args[1:]))
        del runs[:]
        found, wanted = logits(moe), logits(exact)
    assert len(runs) > NUM_NEW
    assert not close(found, before)
    assert close(found, wanted)


def test_calls_without_a_cache_run_the_layers_code(moe, steps):
    moe.model(input_ids=torch.tensor([TEXT[:5]]))
    moe.model(input_ids=torch.tensor([TEXT[:1]]), use_cache=False)
    assert not steps


def _as_usual(layer: Any) -> dict[str, Any]:
    return {}


def _rolled_back_later(layer: Any) -> dict[str, Any]:
    layer.record_past = True  # as while an assistant's tokens are checked
    return {}


def _masked(layer: Any) -> dict[str, Any]:
    return {"attention_mask": torch.tensor([[1], [0]])}


def _updates_otherwise(layer: Any) -> dict[str, Any]:
    stock = layer.update_recurrent_state
    layer.update_recurrent_state = lambda state, *args, **kwargs: stock(2 * state, *args, **kwargs)
    return {}


PREPARE = [_as_usual, _rolled_back_later, _masked, _updates_otherwise]


def call(layer: Any, forward: Any, x: Tensor, cache: DynamicCache, **more: Any) -> Tensor:
    parameters = signature(type(layer).forward).parameters
    name = next(name for name in CACHE_NAMES if name in parameters)
    with torch.no_grad():
        out: Tensor = forward(x, position_embeddings=None, **{name: cache}, **more)
    return out


def new_cache(layer: Any) -> DynamicCache:
    cache = DynamicCache()
    index: int = getattr(layer, LINEAR_ATTENTION).layer_idx
    cache.layers = [LinearAttentionLayer() for _ in range(index + 1)]
    return cache


@pytest.mark.sample(2)
@pytest.mark.parametrize("prepare", PREPARE)
def test_a_step_that_is_more_than_a_token_runs_the_layers_code(moe, steps, prepare):
    layer = layers_of(moe)[0]
    moe.model(input_ids=torch.tensor([TEXT[:5]]))  # a pass has begun
    x = torch.randn(2, 6, len(layer.input_layernorm.weight))
    outs = []
    for forward in (layer, partial(type(layer).forward, layer)):
        cache = new_cache(layer)
        call(layer, forward, x[:, :5], cache)
        more = prepare(cache.layers[-1])
        outs.append(call(layer, forward, x[:, 5:].contiguous(), cache, **more))
    assert close(*outs)
    assert len(steps) == (prepare is _as_usual)


def test_states_that_nobody_takes_change_nothing(moe):
    """A layer may be computed before the model calls it, and then not be called."""
    layer = layers_of(moe)[0]
    attention = getattr(layer, LINEAR_ATTENTION)
    cache = new_cache(layer)
    own: Any = cache.layers[-1]
    moe.model(input_ids=torch.tensor([TEXT[:5]]))
    call(layer, layer, torch.randn(2, 5, len(layer.input_layernorm.weight)), cache)
    names = linear_attention.products_of(attention)
    assert names is not None
    access = DeltaStates(linear_attention.shape_of(attention, names), SpareStates())
    before = own.conv_states[0].clone(), own.recurrent_states[0].clone()
    mark = access.mark(own)
    states = access.open(own)
    states.next_window.fill_(1)
    states.next_recurrent.fill_(2)
    assert torch.equal(own.conv_states[0], before[0])
    assert torch.equal(own.recurrent_states[0], before[1])
    assert access.mark(own) is mark
    access.add_token(own, states)
    assert access.mark(own) is not mark
    assert (own.conv_states[0] == 1).all()
    assert (own.recurrent_states[0] == 2).all()
    assert access.open(own).next_window.data_ptr() == states.window.data_ptr()


def test_layers_share_the_memory_of_next_states():
    """One pair is enough for layers that are computed one after the other."""
    spare = SpareStates()
    states = [(torch.zeros(2, 8, 4), torch.zeros(2, 4, 8, 16)) for _ in range(3)]
    addresses = {tensor.data_ptr() for pair in states for tensor in pair}
    for pair in states:
        taken = spare.take(pair)
        addresses |= {tensor.data_ptr() for tensor in taken}
        spare.give_back(pair)
    assert len(addresses) == 2 * (len(states) + 1)
    other = spare.take((torch.zeros(1, 8, 4), torch.zeros(1, 4, 8, 16)))
    assert other[1].shape == (1, 4, 8, 16)


def test_a_layer_that_computes_otherwise_is_left_alone(own_layer, monkeypatch):
    assert isinstance(find_delta_rule(own_layer), Found)
    norm = getattr(own_layer, LINEAR_ATTENTION).norm
    monkeypatch.setattr(type(norm), "forward", lambda self, x, gate: x * gate)
    verdict = find_delta_rule(own_layer)
    assert isinstance(verdict, FellBack)
    assert "other numbers" in verdict.reason


@pytest.mark.parametrize("are_whole", [True, False])
def test_columns_of_whole_heads_may_be_reordered(own_layer, are_whole):
    """As in GGUF files, whose heads of values lie in another order."""
    attention = getattr(own_layer, LINEAR_ATTENTION)
    wanted = attention.out_proj.weight
    heads = torch.arange(wanted.shape[1]).view(attention.num_v_heads, -1)
    columns = (heads.flip(0) if are_whole else heads.T).flatten()
    packed: Any = nn.Linear(wanted.shape[1], wanted.shape[0], bias=False)
    packed.weight = nn.Parameter(wanted[:, columns.argsort()].contiguous())
    packed.packed = None
    packed.dtype = torch.float32
    attention.out_proj = ReorderedLinear(packed, columns)
    assert torch.equal(attention.out_proj.weight, wanted)
    assert isinstance(find_delta_rule(own_layer), Found if are_whole else FellBack)


def test_another_class_with_the_same_parts_is_left_alone(own_layer):
    module = nn.ModuleDict({"conv1d": nn.Conv1d(8, 8, 4, groups=8), "norm": nn.Identity()})
    for name in (*linear_attention.APART, "out_proj"):
        module[name] = nn.Linear(8, 8)
    assert is_delta_rule(module)
    setattr(own_layer, LINEAR_ATTENTION, module)
    assert isinstance(find_delta_rule(own_layer), FellBack)
