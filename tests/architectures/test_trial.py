"""A trial's verdict: what agrees is found, and all others say why they fell back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_infinity.architectures.trial import (
    Differs,
    FellBack,
    Found,
    Trial,
    Verdict,
    first_found,
    first_that,
    is_close,
    verdict,
)


def raising(error: Exception):
    def search() -> int:
        raise error

    return search


def test_verdict_is_the_candidate_that_a_search_returns():
    assert verdict(lambda: first_that([1, 2, 3], lambda n: n > 1, "small")) == Found(2)


def test_verdict_names_what_differs_and_that_the_module_ran():
    search = raising(Differs("its sums are others"))
    assert verdict(search) == FellBack("its sums are others", has_run=True)


def test_verdict_names_the_error_of_a_module_that_wants_other_arguments():
    verdict_of_error = verdict(raising(ValueError("wants a mask\nhint: none")))
    assert verdict_of_error == FellBack("on trial it raised ValueError: wants a mask")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_verdict_lets_interruptions_pass(error):
    with pytest.raises(error):
        verdict(raising(error()))


def test_verdict_keeps_no_gradients():
    assert verdict(torch.is_grad_enabled) == Found(False)


def test_first_found_prefers_found_then_a_module_that_ran():
    raised, differed = FellBack("raised"), FellBack("differs", has_run=True)
    verdicts: list[Verdict[int]] = [raised, differed, Found(1), Found(2)]
    assert first_found(verdicts) == Found(1)
    assert first_found([raised, differed, FellBack("also", has_run=True)]) == differed
    assert first_found([raised, FellBack("later")]) == raised


def test_trial_runs_a_copy_without_hooks_and_with_stubs():
    seen = []
    linear = nn.Linear(4, 4).to(torch.bfloat16)
    linear.register_forward_hook(lambda *_: seen.append(1))
    block = nn.Sequential(linear, nn.Linear(4, 4).to(torch.bfloat16))
    trial = Trial(block, seed=1, stubs={"1": nn.Identity()})
    x = trial.random(2, 4)
    wanted = nn.functional.linear(x, linear.weight.float(), linear.bias.float())
    assert is_close(trial.module(x), wanted)
    assert seen == []
    assert linear.weight.dtype == torch.bfloat16


def test_trial_draws_the_same_numbers_from_the_same_seed():
    first, same, other = (Trial(nn.Identity(), seed=seed).random(3) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_is_close_is_false_for_other_shapes_and_for_nan():
    x = torch.ones(2)
    assert is_close(x, x + 1e-6)
    assert not is_close(x, x + 1e-3)
    assert not is_close(x, torch.ones(3))
    assert not is_close(x, x * torch.nan)
