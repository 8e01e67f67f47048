"""No operation mixes tensors of the CPU and of the device: a GPU would refuse it, or wait for a
copy that is not needed. Seen on a device that is nowhere.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.engine import kernel_trial
from moe_infinity.engine.torch_backend import TorchWork
from tests.cache_name import CACHE
from tests.fake_cuda import fake_device
from tests.meta_device import NOWHERE, PAIR_KERNELS, MetaCudaDevice, made_up_routing
from tests.quantized_checkpoints import CHECKPOINTS, build
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import tiny_model

# One of each kind of adapter, and of each way a class has of summing up.
FOLDERS = [
    "dbrx", "deepseek_v3", "gpt_oss", "jamba", "longcat_flash", "mixtral", "nemotron_h",
    "qwen3_vl_moe", "zaya",
]  # fmt: skip


def prompt_and_token(folder: Path, **options: Any) -> None:
    budgets = {"device_memory": "40%", "host_memory": "60%"}
    kernels = mock.patch.multiple(
        kernel_trial,
        pair_kernels=lambda device: PAIR_KERNELS,
        disagreement=lambda *_, **__: None,  # there are no values to compare
    )
    with ExitStack() as doubles:
        for double in (fake_device(MetaCudaDevice()), kernels, made_up_routing()):
            doubles.enter_context(double)
        moe = doubles.enter_context(MoE(folder, **budgets, **options))
        ids = torch.zeros(1, 9, dtype=torch.int64, device=NOWHERE)
        out = moe.model(ids, use_cache=True)
        last = {"input_ids": ids[:, :1], "position_ids": ids[:, :1]}
        out = moe.model(**last, use_cache=True, **{CACHE: out.past_key_values})
        assert out.logits.device == NOWHERE
        assert moe.report().decode.lookups > 0


@pytest.mark.sample(3)
@pytest.mark.parametrize("folder", FOLDERS)
def test_experts_of_every_kind_of_class(folder, tmp_path):
    tiny_model(architectures_in(folder)[0]).save_pretrained(tmp_path)
    prompt_and_token(tmp_path, exact=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "fast"])
def test_every_implementation(tiny_checkpoint, implementation):
    prompt_and_token(tiny_checkpoint, experts_implementation=implementation, prefetch=True)


# An index is asked whether its groups are in order.
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name", [n for n in CHECKPOINTS if not n.startswith("gptq") and "order" not in n]
)
def test_packed_experts(name, tmp_path):
    prompt_and_token(build(name, tmp_path / name), exact=True)


@pytest.mark.sample(3)
@pytest.mark.parametrize("expert_dtype", ["int4", "int8", "fp8"])
def test_experts_packed_on_load(tiny_checkpoint, expert_dtype):
    prompt_and_token(tiny_checkpoint, expert_dtype=expert_dtype, exact=True)


def test_indices_that_stay_on_the_cpu_are_found(tiny_checkpoint, monkeypatch):
    init = TorchWork.__init__

    def forgetful(self: TorchWork, *args: Any) -> None:
        init(self, *args)
        self._pairs_P = torch.arange(len(self._pairs_P))

    monkeypatch.setattr(TorchWork, "__init__", forgetful)
    with pytest.raises(AssertionError, match="mixes devices"):
        prompt_and_token(tiny_checkpoint, exact=True)
