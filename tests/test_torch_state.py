"""What the caller has set in torch is none of our business: default dtype and device, inference
mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from moe_infinity import MoE
from tests.cache_name import CACHE
from tests.fake_cuda import FakeCudaDevice, fake_device
from tests.gpu.fast_device import CACHES, on_device
from tests.on_device import LONG_PROMPT, PROMPT, greedy

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(3)]

BUDGETS = {"device_memory": "30%", "host_memory": "50%"}
EXACT = {"exact": True}
DTYPES = [torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(params=DTYPES, ids=str)
def set_dtype(request) -> Iterator[Any]:
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(request.param)
    torch.set_default_dtype(before)


def tokens(moe: MoE, **cache: Any) -> list[Any]:
    return [greedy(moe, prompt, **cache).tolist() for prompt in (PROMPT, LONG_PROMPT)]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "options",
    [{}, {"expert_dtype": "int8"}, {"expert_dtype": "int4"}, EXACT],
    ids=str,
)
def test_the_default_dtype_changes_nothing_on_a_cpu(tiny_checkpoint, set_dtype, options):
    with MoE(tiny_checkpoint, device="cpu", host_memory="50%", **options) as moe:
        expected = tokens(moe)
        set_dtype()
        assert tokens(moe) == expected
    with MoE(tiny_checkpoint, device="cpu", host_memory="50%", **options) as moe:
        assert tokens(moe) == expected


@pytest.mark.sample(4)
@pytest.mark.parametrize("cache", CACHES)
def test_the_default_dtype_changes_nothing_on_a_device(tiny_checkpoint, set_dtype, cache):
    with on_device(tiny_checkpoint, "30%") as moe:
        expected = tokens(moe, **cache)
        set_dtype()
        assert tokens(moe, **cache) == expected
    with on_device(tiny_checkpoint, "30%") as moe:
        assert tokens(moe, **cache) == expected


def logits_of(moe: MoE) -> torch.Tensor:
    """Of a prompt and of a token after it."""
    ids = torch.tensor([[5, 9, 40, 7]], device="cpu")
    with torch.no_grad():
        out = moe.model(input_ids=ids, use_cache=True)
        after = moe.model(input_ids=ids[:, :1], **{CACHE: out.past_key_values})
    logits: torch.Tensor = after.logits
    return logits


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_what_kernels_need_is_not_made_on_the_default_device(tiny_checkpoint, device):
    """Meta tensors have no memory."""
    where = MoE(tiny_checkpoint, device="cpu", host_memory="50%")
    with where if device == "cpu" else on_device(tiny_checkpoint, "30%") as moe:
        expected = logits_of(moe)
        with torch.device("meta"):
            found = logits_of(moe)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("opened_in", [nullcontext, torch.inference_mode])
@pytest.mark.parametrize(("is_locking", "options"), [(True, EXACT), (False, EXACT), (True, {})])
def test_inference_mode_may_come_and_go(tiny_checkpoint, is_locking, opened_in, options):
    entered: AbstractContextManager[Any] = opened_in()
    with fake_device(FakeCudaDevice(is_locking=is_locking)):
        with entered:
            moe = MoE(tiny_checkpoint, **BUDGETS, **options)
        with moe:
            with torch.inference_mode():
                expected = logits_of(moe)
            assert torch.equal(logits_of(moe), expected)
            with torch.inference_mode():
                assert torch.equal(logits_of(moe), expected)
            tokens(moe)
