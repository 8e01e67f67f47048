"""Inputs that are not of this model, and caches of other kinds: what torch refuses is refused, and
no kernel reads or writes beyond them. What transformers' other ways of generating bring is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from moe_infinity import MoE
from tests.architectures.test_decoder_layers import saved
from tests.cache_name import CACHE

pytestmark = pytest.mark.arithmetic
IDS = torch.tensor([[5, 6, 9, 100, 31]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return saved("Qwen3Moe", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def moe(folder) -> Iterator[MoE]:
    with MoE(folder, host_memory="100%") as moe:
        moe.preload()
        yield moe


@torch.no_grad()
def begun(model: Any) -> Any:
    """A cache of the prompt, behind a decode step."""
    cache = DynamicCache(config=model.config)
    for ids in (IDS, IDS[:, :1]):
        model(ids, **{CACHE: cache})
    return cache


@pytest.mark.parametrize("change", [{"head_dim": 32}, {"num_key_value_heads": 4}])
def test_a_cache_of_another_model_is_what_torch_says_of_it(moe, change, tmp_path):
    begun(moe.model)
    other = AutoModelForCausalLM.from_pretrained(saved("Qwen3Moe", tmp_path, **change))
    with torch.no_grad(), pytest.raises(RuntimeError):
        moe.model(IDS[:, :1], **{CACHE: begun(other)})


def test_embeddings_of_another_width_are_what_torch_says_of_them(moe):
    x = torch.zeros(1, 1, 32, dtype=moe.model.dtype)
    with torch.no_grad(), pytest.raises(RuntimeError):
        moe.model(inputs_embeds=x, **{CACHE: begun(moe.model)})


@pytest.mark.parametrize("width", [32, 128])
def test_rows_of_another_width_are_what_torch_says_of_them(moe, width):
    with torch.no_grad(), pytest.raises(RuntimeError):
        moe.model.lm_head(torch.randn(1, width, dtype=moe.model.dtype))


def test_continuous_batching_of_transformers_generates(moe, folder):
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    if not hasattr(transformers, "ContinuousBatchingConfig"):
        pytest.skip("this version of transformers has none")
    # By default its cache takes half of the machine's memory.
    small = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1)
    found = [
        model.generate_batch([[5, 6, 9, 100], [31, 7]], settings, small, warmup=False)
        for model in (stock, moe.model)
    ]
    expected, tokens = ([each.generated_tokens for each in one.values()] for one in found)
    assert tokens == expected
    assert all(len(each) == 4 for each in tokens)
