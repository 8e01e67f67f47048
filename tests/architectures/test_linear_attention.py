"""Decode steps of linear attention: the kernel gives what the module gives, and stands back where
it cannot know that.
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
from moe_infinity.architectures.linear_attention import LinearAttentions, products_of
from moe_infinity.architectures.trial import FellBack
from moe_infinity.kernels.cpu.delta_rule import delta_step
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
def steps(monkeypatch: Any) -> list[Tensor]:
    """The results of the kernel, as they come."""
    results: list[Tensor] = []
    stock = delta_step

    def counted(*args: Any) -> Tensor:
        results.append(stock(*args))
        return results[-1]

    monkeypatch.setattr(linear_attention, "delta_step", counted)
    return results


def attentions_of(moe: MoE) -> list[Any]:
    return [module for module in moe.model.modules() if products_of(module) is not None]


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


@pytest.mark.parametrize("lengths", [(9,), (1,), (12, 5, 9)])
def test_tokens_are_those_of_the_modules_own_code(folder, moe, steps, lengths):
    found = logits(moe, lengths)
    assert len(steps) == (NUM_NEW - 1) * len(attentions_of(moe)) > 0
    with MoE(folder, dtype="float32", exact=True) as exact:
        wanted = logits(exact, lengths)
    assert len(steps) == (NUM_NEW - 1) * len(attentions_of(moe))
    assert close(found, wanted)
    (path,) = (each for each in moe.report().paths if each.taken.kind == "attention")
    assert path.taken.reason is None
    assert path.count == len(attentions_of(moe))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_goes_through_the_kernel(folder, steps, dtype):
    with MoE(folder, dtype=dtype) as moe:
        del steps[:]  # one of the trial
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
    paths = [each for each in moe.report().paths if each.taken.kind == "attention"]
    assert sum(each.count for each in paths if each.taken.reason is not None) == num_changed


def test_another_convolution_in_torch_is_called(folder, moe, steps, monkeypatch):
    stock = nn.functional.conv1d
    monkeypatch.setattr(nn.functional, "conv1d", lambda *args, **kwargs: 2 * stock(*args, **kwargs))
    with MoE(folder, dtype="float32", exact=True) as exact:
        del steps[:]  # of trials
        assert close(logits(moe), logits(exact))
    assert not steps


def test_hooks_on_linear_layers_are_seen_and_the_kernel_goes_on(moe, steps):
    seen = []
    attentions_of(moe)[0].out_proj.register_forward_hook(lambda *args: seen.append(args))
    logits(moe)
    assert len(seen) == NUM_NEW
    assert len(steps) == (NUM_NEW - 1) * len(attentions_of(moe))


def test_gradients_and_calls_without_a_cache_run_the_modules_code(moe, steps):
    x = torch.randn(1, 1, attentions_of(moe)[0].out_proj.out_features)
    with torch.no_grad():
        attentions_of(moe)[0](x)
    moe.model(input_ids=torch.tensor([TEXT[:5]]))
    assert not steps


def _as_usual(layer: Any) -> dict[str, Any]:
    return {}


def _rolled_back_later(layer: Any) -> dict[str, Any]:
    layer.record_past = True  # as while an assistant's tokens are checked
    return {}


def _masked(layer: Any) -> dict[str, Any]:
    return {"attention_mask": torch.tensor([[1], [0]])}


@pytest.mark.parametrize("prepare", [_as_usual, _rolled_back_later, _masked])
def test_a_step_that_is_more_than_a_token_runs_the_modules_code(moe, steps, prepare):
    module = attentions_of(moe)[0]
    x = torch.randn(2, 6, module.out_proj.out_features)
    parameters = signature(type(module).forward).parameters
    name = next(name for name in linear_attention.CACHE_ARGUMENTS if name in parameters)
    outs = []
    for forward in (module, partial(type(module).forward, module)):
        cache = DynamicCache()
        cache.layers = [LinearAttentionLayer() for _ in range(module.layer_idx + 1)]
        with torch.no_grad():
            forward(x[:, :5], **{name: cache})
            more = prepare(cache.layers[-1])
            outs.append(forward(x[:, 5:], **{name: cache}, **more))
    assert close(*outs)
    assert len(steps) == (prepare is _as_usual)


def test_a_module_that_computes_otherwise_is_left_alone(moe, monkeypatch):
    module = attentions_of(moe)[0]
    monkeypatch.setattr(type(module.norm), "forward", lambda self, x, gate: x * gate)
    found = LinearAttentions(nn.ModuleDict({"one": module}))
    verdict = found._verdicts[module]
    assert isinstance(verdict, FellBack)
    assert "other numbers" in verdict.reason


def test_another_class_with_the_same_parts_is_left_alone():
    module = nn.ModuleDict({"conv1d": nn.Conv1d(8, 8, 4, groups=8), "norm": nn.Identity()})
    for name in (*linear_attention.APART, "out_proj"):
        module[name] = nn.Linear(8, 8)
    (verdict,) = LinearAttentions(nn.ModuleDict({"one": module}))._verdicts.values()
    assert isinstance(verdict, FellBack)


def test_a_trial_copies_no_linear_layer(moe, monkeypatch):
    module = attentions_of(moe)[0]
    copied: list[nn.Module] = []

    def noted(memo: Any) -> nn.Module:
        copied.append(module)
        return nn.Identity()

    for name in (*(products_of(module) or ()), "out_proj"):
        monkeypatch.setattr(getattr(module, name), "__deepcopy__", noted, raising=False)
    (verdict,) = LinearAttentions(nn.ModuleDict({"one": module}))._verdicts.values()
    assert not isinstance(verdict, FellBack)
    assert not copied
    module.out_proj.__deepcopy__({})
    assert copied
