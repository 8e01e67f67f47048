"""Every architecture of the installed transformers on a fake device, in steps that the device
decides wherever kernels read its experts.

All of them take minutes, so most are marked slow; the others are one of each kind.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from moe_infinity import ConfigError, MoE, MoEInfinityError
from moe_infinity.gpu.device_steps import DeviceSteps
from tests.gpu.fast_device import on_device
from tests.sweep import tiny
from tests.sweep.compare import difference
from tests.sweep.discover import architectures_in
from tests.sweep.on_gpu import decode_step
from tests.sweep.overrides import NOT_COMPARED
from tests.sweep.runners import Outcome, outcome

pytestmark = pytest.mark.arithmetic

FAST = {
    "gpt_oss": "transposed, with biases, gate and up in turn",
    "llama4": "routing weighs what goes in",
    "longcat_flash": "pairs without an expert",
    "nemotron_h": "no gate",
}
# Whose steps the host decides.
BY_HOST = {
    "DbrxForCausalLM": "its two kinds of weights lie in two ways",
    "DiffusionGemmaForBlockDiffusion": "no step of few tokens: it refines a canvas",
    "Inkling2ForCausalLM": "its gate is capped softly",
    "Inkling2ForConditionalGeneration": "its gate is capped softly",
    "MuseSparkForConditionalGeneration": "a norm after each expert",
    "NllbMoeForConditionalGeneration": "an encoder",
    "Qwen3OmniMoeForConditionalGeneration": "two models, of which one runs at a time",
    "SwitchTransformersForConditionalGeneration": "an encoder",
}
TOLERANCE = 1e-4  # of the largest logit, in float32: sums have another order


def run(checkpoint: Path, device_memory: str) -> tuple[Outcome, bool]:
    """And whether the device decided in a step."""
    with (
        on_device(checkpoint, device_memory, dtype="float32") as moe,
        mock.patch.object(
            DeviceSteps, "run_layer", autospec=True, side_effect=DeviceSteps.run_layer
        ) as rows,
        torch.no_grad(),
    ):
        found = outcome(moe.model, moe.generate)
        moe.check_invariants()
        return found, rows.called


@pytest.mark.sample(3)
@pytest.mark.sweep(FAST)
def test_no_budget_changes_a_bit_and_the_exact_path_agrees(folder, tmp_path):
    for architecture in architectures_in(folder):
        checkpoint, name = tmp_path / architecture.name, architecture.name
        torch.manual_seed(0)
        tiny.tiny_model(architecture).save_pretrained(checkpoint)
        try:
            with (
                MoE(checkpoint, host_memory="50%", dtype="float32", exact=True) as moe,
                torch.no_grad(),
            ):
                exact = outcome(moe.model, moe.generate)
        except MoEInfinityError:
            assert name in NOT_COMPARED
            continue
        try:
            resident, is_by_device = run(checkpoint, "100%")
        except ConfigError:
            assert name in BY_HOST
            continue
        assert is_by_device == (name not in BY_HOST), name
        assert not difference(resident, exact, TOLERANCE)
        few, _ = run(checkpoint, "30%")
        assert not difference(few, resident, 0.0)


@pytest.mark.parametrize(
    ("folder", "steps"),
    [
        ("qwen3_moe", "one graph"),
        ("qwen3_next", "one graph"),
        pytest.param("phimoe", "kernel by kernel", marks=pytest.mark.slow),  # a copy from the host
        pytest.param("minimax", "kernel by kernel", marks=pytest.mark.slow),  # a cache of its own
        ("dbrx", "by the host"),
    ],
)
def test_how_steps_run_is_found(folder, steps, tmp_path):
    (architecture,) = architectures_in(folder)
    assert decode_step(architecture, tmp_path) == steps
