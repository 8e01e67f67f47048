"""What routers compute, Triton's kernels against their definition.

Legend: B tokens, E experts, D model width, K experts of a token.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_infinity.gpu.kernels import reference
from moe_infinity.gpu.kernels.descriptions import (
    GROUP_SCORES,
    SCORES,
    WEIGHTS,
    ExpertChoice,
)
from tests.gpu.kernels.interpreted import round_as_gpus_do

pytest.importorskip("triton", reason="needs triton")
from moe_infinity.gpu.kernels import routing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float32).eps
TWO_BEST = GROUP_SCORES[1]
BEFORE_SUM = WEIGHTS[1]
OF_DEEPSEEK_V3 = ExpertChoice(
    8, "sigmoid", BEFORE_SUM, factor=2.5, num_groups=8, kept_groups=4, group_score=TWO_BEST
)

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def like_a_gpu(monkeypatch):
    torch.manual_seed(0)
    round_as_gpus_do(monkeypatch)


def chosen(
    logits: Tensor, correction: Tensor | None, choice: ExpertChoice
) -> tuple[Tensor, Tensor]:
    correction = None if correction is None else correction.to(DEVICE)
    index, weights = routing.choose(logits.to(DEVICE), correction, choice)
    return index.cpu(), weights.cpu()


def check(logits: Tensor, correction: Tensor | None, choice: ExpertChoice) -> None:
    index, weights = chosen(logits, correction, choice)
    expected_index, expected = reference.choose(logits, correction, choice)
    assert torch.equal(index, expected_index)
    assert index.dtype == torch.int64
    few = 1e-5 if choice.dtype == torch.float32 else torch.finfo(choice.dtype).eps
    torch.testing.assert_close(weights, expected, rtol=few, atol=0, equal_nan=True)


def spread(num_tokens: int, num_experts: int) -> Tensor:
    """Logits that are far enough apart for any rounding, but for some that are equal."""
    values = torch.linspace(-4, 4, num_experts)
    values[1::5] = values[::5][: len(values[1::5])]
    return torch.stack([values[torch.randperm(num_experts)] for _ in range(num_tokens)])


@pytest.mark.sample(7)
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"),
    [(1, 8, 1), (3, 8, 8), (32, 8, 2), (3, 60, 4), (1, 64, 8), (3, 64, 5), (1, 128, 8),
     (3, 128, 9), (32, 128, 8), (1, 256, 10), (3, 256, 3), (2, 160, 6), (2, 1, 1)],
)  # fmt: skip
def test_a_choice_is_its_definition(num_tokens, num_experts, top_k, scores, weights):
    choice = ExpertChoice(top_k, scores, weights)
    logits = spread(num_tokens, num_experts)
    check(logits, None, choice)
    check(logits, 0.3 * torch.randn(num_experts), replace(choice, factor=1.7))
    check(logits, torch.randn(num_experts).bfloat16(), replace(choice, dtype=torch.bfloat16))
    check(logits.bfloat16(), None, choice)


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize("group_score", GROUP_SCORES)
@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_groups", "kept_groups"),
    [(256, 8, 8, 4), (160, 6, 8, 3), (8, 3, 4, 2), (60, 4, 5, 1), (128, 8, 8, 8), (24, 2, 3, 2)],
)
def test_groups_are_kept_by_their_scores(
    num_experts, top_k, num_groups, kept_groups, group_score, is_corrected
):
    correction = 0.5 * torch.randn(num_experts) if is_corrected else None
    for scores in SCORES:
        choice = ExpertChoice(
            top_k,
            scores,
            num_groups=num_groups,
            kept_groups=kept_groups,
            group_score=group_score,
        )
        check(torch.randn(3, num_experts), correction, choice)


@pytest.mark.parametrize("choice", [ExpertChoice(3), replace(OF_DEEPSEEK_V3, top_k=3)], ids=str)
def test_of_equal_scores_the_lower_index_is_first(choice):
    for logits in (torch.zeros(2, 16), torch.tensor([0.0, -0.0]).repeat(2, 8)):
        index, weights = chosen(logits, None, choice)
        assert index.tolist() == [[0, 1, 2]] * 2
        assert (weights == weights[0, 0]).all()
        check(logits, None, choice)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_no_logits_lead_beyond_the_experts(scores, num_groups, odd):
    kept = 2 if num_groups > 1 else 1
    choice = ExpertChoice(5, scores, num_groups=num_groups, kept_groups=kept, group_score=TWO_BEST)
    logits = torch.randn(4, 12)
    logits[0, 7] = logits[1, 3] = logits[1, 4] = logits[2, 1:] = logits[3] = odd
    check(logits, None, choice)
    index, _ = chosen(logits, None, choice)
    assert (index >= 0).all()
    assert (index < 12).all()
    assert all(len(set(experts)) == 5 for experts in index.tolist())


@pytest.mark.parametrize("choice", [ExpertChoice(4, weights=BEFORE_SUM), OF_DEEPSEEK_V3], ids=str)
def test_a_choice_does_not_depend_on_how_many_tokens_there_are(choice):
    logits, correction = torch.randn(8, 64), 0.1 * torch.randn(64)
    index, weights = chosen(logits, correction, choice)
    for t in (0, 3, 7):
        alone = chosen(logits[t : t + 1], correction, choice)
        assert torch.equal(alone[0], index[t : t + 1])
        assert torch.equal(alone[1], weights[t : t + 1])


@pytest.mark.parametrize(
    "changed",
    [{"scores": "softmax"}, {"scores": "logits"}, {"weights": "as they are"},
     {"weights": "softmax"}, {"factor": 1.0}, {"num_groups": 4}, {"kept_groups": 2},
     {"group_score": "best"}, {"top_k": 7}, {"dtype": torch.bfloat16}],
    ids=str,
)  # fmt: skip
def test_every_part_of_a_choice_is_seen(changed):
    logits, correction = torch.randn(4, 64), 0.2 * torch.randn(64)
    choice = replace(OF_DEEPSEEK_V3, kept_groups=3)
    other = replace(choice, **changed)
    check(logits, correction, other)
    found, wrong = (chosen(logits, correction, c) for c in (choice, other))
    is_equal = torch.equal(found[0], wrong[0]) and torch.equal(found[1], wrong[1])
    assert not is_equal


def test_sums_of_weights_are_not_divided_by_zero():
    logits = torch.full((1, 8), -200.0)
    index, weights = chosen(logits, None, ExpertChoice(2, "sigmoid", BEFORE_SUM))
    assert index.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.0, 0.0]]
    check(logits, None, ExpertChoice(2, "sigmoid", BEFORE_SUM))


def test_a_choice_fits_what_it_can_be_made_among():
    assert OF_DEEPSEEK_V3.fits(256)
    assert not OF_DEEPSEEK_V3.fits(8)  # the two best of one
    assert not OF_DEEPSEEK_V3.fits(250)
    assert not replace(OF_DEEPSEEK_V3, top_k=9).fits(16)
    assert not ExpertChoice(9).fits(8)
    assert ExpertChoice(8).fits(8)
