"""Quantized checkpoints of every format on a fake device, in steps that the device decides."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.gpu.device_steps import DeviceSteps
from tests.gpu.fast_device import on_device
from tests.on_device import PROMPT
from tests.quantized_checkpoints import CHECKPOINTS, build, edit_config, has_kernels

pytestmark = pytest.mark.arithmetic

# Of the largest logit: unpacking rounds a weight to the dtype of its scale, kernels do not.
TOLERANCE = 2e-3  # scales in float16 or float32
INT4_TOLERANCE = 2e-2  # scales in bfloat16, so 2 ** -9 of each weight


@torch.no_grad()
def logits_of(moe: MoE) -> Tensor:
    """[N, vocabulary] of the last token of a prompt and of eight tokens after it, one by one."""
    given = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    options = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    out = moe.generate(**given, max_new_tokens=9, **options)
    return torch.cat(out.logits)


def decided_logits(folder: Path, device_memory: str) -> Tensor:
    with (
        on_device(folder, device_memory, dtype="float32") as moe,
        mock.patch.object(
            DeviceSteps, "run_layer", autospec=True, side_effect=DeviceSteps.run_layer
        ) as rows,
    ):
        found = logits_of(moe)
        assert rows.call_count == 8 * moe.model.config.num_hidden_layers
        moe.check_invariants()
        return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", [n for n in CHECKPOINTS if has_kernels(n, reads_index=True)])
def test_the_device_reads_what_the_host_unpacks(name, tmp_path):
    folder = build(name, tmp_path)
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        expected = logits_of(moe)
    found = decided_logits(folder, "100%")
    tolerance = INT4_TOLERANCE if name.startswith("int4") else TOLERANCE
    assert (found - expected).abs().max() < tolerance * expected.abs().max()
    assert torch.equal(decided_logits(folder, "30%"), found)


def test_gptq_that_says_its_columns_are_in_order_is_believed(tmp_path):
    """As other kernels for it do; so the index is not read, and this would fail if it were. By the
    host alike: a prompt and the steps after it have one weight.
    """
    folder = build("gptq_v2 with act-order", tmp_path)
    by_index = decided_logits(folder, "100%")
    edit_config(
        folder,
        lambda c: c | {"quantization_config": c["quantization_config"] | {"desc_act": False}},
    )
    believed = decided_logits(folder, "100%")
    apart = (believed - by_index).abs().max()
    assert apart > 10 * TOLERANCE * by_index.abs().max()
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        assert (logits_of(moe) - believed).abs().max() < TOLERANCE * believed.abs().max()
