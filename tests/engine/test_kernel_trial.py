"""The kernel of experts on a fake device: it is used where it agrees with torch when the model is
loaded, and what it computes does not depend on the budgets.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_infinity import ConfigError, MoE
from moe_infinity.engine import kernel_trial
from moe_infinity.engine.slots import PairKernels
from moe_infinity.kernels.reference import Activation
from moe_infinity.kernels.triton import reference
from moe_infinity.kernels.triton.slot_mlp import SlotMlp
from moe_infinity.memory.device_mover import COPIED_GROUPS
from tests.closeness import distance, logits_of_steps
from tests.fake_cuda import FakeCudaDevice, fake_device
from tests.on_device import BUDGETS, LONG_PROMPT, PROMPT, assert_same_tokens, greedy
from tests.quantized_checkpoints import build
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import tiny_model

pytestmark = pytest.mark.arithmetic

PLAIN = PairKernels(reference.compute_pairs, reference.sum_pairs)
IDS = torch.cat([PROMPT, LONG_PROMPT[:, :16]], dim=1)


def use(monkeypatch: pytest.MonkeyPatch, kernels: PairKernels | None) -> None:
    """In models that are opened from now on."""
    monkeypatch.setattr(kernel_trial, "pair_kernels", lambda device: kernels)
    tried = ((1, 0.5), (5, 8.0), (40, 1.0))  # the reference is slow
    monkeypatch.setattr(kernel_trial, "TRIED", tried)


def opened(folder: Any, device_memory: str = "30%", host_memory: str = "60%", **more: Any) -> MoE:
    budgets = {"device_memory": device_memory, "host_memory": host_memory}
    with fake_device(FakeCudaDevice()):
        return MoE(folder, **budgets, **more)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    """Tokens by the kernel, with all experts resident."""
    with pytest.MonkeyPatch.context() as patched:
        use(patched, PLAIN)
        with opened(tiny_checkpoint, "100%", "100%") as moe:
            assert moe.report().experts == "as stored, by one kernel"
            return greedy(moe), greedy(moe, LONG_PROMPT)


@pytest.mark.sample(3)
@pytest.mark.grid
@pytest.mark.parametrize("host_memory", BUDGETS)
@pytest.mark.parametrize("device_memory", BUDGETS)
def test_no_budget_of_either_tier_changes_a_token(
    tiny_checkpoint, expected, monkeypatch, device_memory, host_memory
):
    use(monkeypatch, PLAIN)
    with opened(tiny_checkpoint, device_memory, host_memory) as moe:
        assert_same_tokens(moe, expected, rounds=2)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "folder",
    ["gpt_oss", "llama4", "longcat_flash", "nemotron_h", "mixtral", "aria"],
)
def test_the_kernel_gives_the_logits_of_torch(folder, tmp_path, monkeypatch):
    """Biases and alternating rows; weights on the input; pairs without an expert; no gate."""
    torch.manual_seed(0)
    tiny_model(architectures_in(folder)[-1]).save_pretrained(tmp_path)
    found = []
    for kernels in (None, PLAIN):
        use(monkeypatch, kernels)
        with opened(tmp_path, dtype="float32") as moe:
            found.append(logits_of_steps(moe.model, IDS, PROMPT.shape[1]))
            assert ("by one kernel" in moe.report().experts) == (kernels is PLAIN)
    assert not torch.equal(*found)  # another order of sums
    assert distance(*found) < 1e-4


def test_without_kernels_torch_computes_and_the_report_says_so(tiny_checkpoint):
    with opened(tiny_checkpoint) as moe:
        assert moe.report().experts == "as stored, by torch: triton is not installed"
    with opened(tiny_checkpoint, exact=True) as moe:
        assert moe.report().experts == "as stored, exact"


def test_packed_experts_are_computed_by_torch(tmp_path, monkeypatch):
    use(monkeypatch, PLAIN)
    with opened(build("mxfp4", tmp_path / "model")) as moe:
        assert "by torch: kernels do not read its weights" in moe.report().experts


def swapped(mlp: SlotMlp) -> SlotMlp:
    assert mlp.up is not None
    return replace(mlp, gate=mlp.up, up=mlp.gate)


WRONG: dict[str, Any] = {
    "gate and up swapped": swapped,
    "another activation": lambda mlp: replace(mlp, activation=Activation("gelu")),
    "down is up": lambda mlp: replace(mlp, up=mlp.gate),
    "weights on the input": lambda mlp: replace(mlp, weighs_input=not mlp.weighs_input),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_kernel_that_computes_something_else_is_not_used(tiny_checkpoint, monkeypatch, wrong):
    def compute_pairs(mlp: SlotMlp, *args: Any) -> None:
        reference.compute_pairs(WRONG[wrong](mlp), *args)

    with opened(tiny_checkpoint) as moe:
        tokens = greedy(moe), greedy(moe, LONG_PROMPT)
    use(monkeypatch, PLAIN._replace(compute_pairs=compute_pairs))
    with opened(tiny_checkpoint) as moe:
        assert "by torch: the kernel is " in moe.report().experts
        assert "away from torch with 1 tokens" in moe.report().experts
        assert_same_tokens(moe, tokens)


@pytest.mark.parametrize("value", [torch.nan, 0.0])
def test_one_wrong_row_of_many_tokens_is_seen(tiny_checkpoint, monkeypatch, value):
    def sum_pairs(mlp: SlotMlp, out_PD: Tensor, index_TK: Tensor, *more: Any) -> Tensor:
        sum_TD = reference.sum_pairs(mlp, out_PD, index_TK, *more)
        sum_TD[17:18] = value
        return sum_TD

    use(monkeypatch, PLAIN._replace(sum_pairs=sum_pairs))
    with opened(tiny_checkpoint) as moe:
        assert "away from torch with 40 tokens" in moe.report().experts


def test_a_kernel_that_cannot_be_compiled_is_not_used(tiny_checkpoint, monkeypatch):
    def compute_pairs(*_: Any) -> None:
        raise RuntimeError("ptxas exited with 255\nand more")

    use(monkeypatch, PLAIN._replace(compute_pairs=compute_pairs))
    with opened(tiny_checkpoint) as moe:
        reason = "by torch: the kernel raised RuntimeError: ptxas exited with 255"
        assert moe.report().experts == f"as stored, {reason}"
        greedy(moe)
    with pytest.raises(ConfigError, match="needs the kernel of experts: the kernel raised"):
        opened(tiny_checkpoint, experts_implementation="fast")


def test_the_trial_draws_no_number_of_the_users_and_leaves_slots_that_are_filled_anew(
    tiny_checkpoint, expected, monkeypatch
):
    use(monkeypatch, PLAIN)
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    with opened(tiny_checkpoint, "100%", "100%") as moe:
        assert torch.equal(torch.rand(3), wanted)
        assert moe.engine.tiers[0].table.num_free == 24
        assert_same_tokens(moe, expected)


@torch.no_grad()
@pytest.mark.parametrize("device_memory", ["30%", "100%"])
def test_a_prompt_is_computed_in_a_few_groups_of_experts(
    tiny_checkpoint, monkeypatch, device_memory
):
    """One of those that are there, and some of those that are copied; more only if they do not fit
    together.
    """
    counter: Counter[str] = Counter()

    def counting(name: str) -> Any:
        def run(*args: Any) -> Any:
            counter.update([name])
            return getattr(PLAIN, name)(*args)

        return run

    use(monkeypatch, PairKernels(*(counting(name) for name in PairKernels._fields)))
    with opened(tiny_checkpoint, device_memory, "100%") as moe:
        moe.preload()
        counter.clear()
        moe.model(torch.arange(3, 103)[None])
        assert counter["sum_pairs"] == 3  # layers
        most = 2 * (1 + COPIED_GROUPS) if device_memory == "30%" else 1 + COPIED_GROUPS
        assert 3 <= counter["compute_pairs"] <= 3 * most
        counter.clear()
        moe.model(torch.arange(3, 103)[None])
        if device_memory == "100%":
            assert counter == {"compute_pairs": 3, "sum_pairs": 3}


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the slots of a fake device are on the CPU")
def test_tritons_kernel_is_tried_and_used(tiny_checkpoint, monkeypatch):
    """By its interpreter, which reads the memory of a fake device."""
    experts = pytest.importorskip("moe_infinity.kernels.triton.experts", reason="needs triton")
    use(monkeypatch, PairKernels(experts.compute_pairs, experts.sum_pairs))
    monkeypatch.setattr(experts, "MANY_PAIRS", 64)
    found = []
    for budgets in (("100%", "100%"), ("10%", "34%")):
        with opened(tiny_checkpoint, *budgets) as moe:
            assert moe.report().experts == "as stored, by one kernel"
            found.append(greedy(moe, num_tokens=5).tolist())
            moe.check_invariants()
    assert found[0] == found[1]
