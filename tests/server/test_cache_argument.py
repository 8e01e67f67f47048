"""A model is given the KV cache by its own name for it; a pass that drops the cache is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from moe_infinity import MoE
from moe_infinity.architectures.attention_inputs import CACHE_NAMES
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.experts import Phase, Step
from moe_infinity.prefixes.cache_layers import has_tokens
from tests.cache_name import CACHE
from tests.server.driving import Client, generated, make_engine, run_all

PROMPTS = [[5, 6, 9, 100, 31], [40, 41, 42, 43, 44, 45, 46, 47, 48]]


@pytest.fixture
def moe(tiny_checkpoint: Path) -> Iterator[MoE]:
    """Not the shared one: its forward method is replaced."""
    with MoE(tiny_checkpoint, host_memory="50%", dtype="float32") as moe:
        yield moe


def takes_cache_as(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    """The forward method of a model whose author chose this name."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **{CACHE if key == name else key: x for key, x in kwargs.items()})

    before = signature(stock)
    parameters = [
        p.replace(name=name) if p.name == CACHE else p for p in before.parameters.values()
    ]
    vars(forward)["__signature__"] = before.replace(parameters=parameters)
    return forward


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_answers_are_those_of_generate_by_either_name(moe, name):
    expected = [generated(moe, prompt) for prompt in PROMPTS]
    moe.model.forward = takes_cache_as(name, moe.model.forward)
    engine = make_engine(moe, max_batch=2, prefill_chunk=4)
    clients = [Client(engine, prompt) for prompt in PROMPTS]
    run_all(engine, *clients)
    assert [client.token_ids for client in clients] == expected


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_step_with_a_cache_by_either_name_is_a_decode_step(moe, name):
    moe.model.forward = takes_cache_as(name, moe.model.forward)
    given = {name: DynamicCache(config=moe.model.config), "use_cache": True}
    ids = torch.tensor([PROMPTS[0]])
    moe.model(ids[:, :4], **given)
    assert moe.report().decode.lookups == 0
    moe.model(ids[:, 4:], **given)
    assert moe.report().decode.lookups > 0


def test_a_model_that_takes_no_cache_is_refused(moe):
    moe.model.forward = takes_cache_as("memory", moe.model.forward)
    with pytest.raises(UnsupportedModelError, match="a parameter named cache or past_key_values"):
        make_engine(moe)
    with pytest.raises(UnsupportedModelError, match="takes no KV cache"):
        moe.forward(
            Step(Phase.PREFILL, 1, 2, begins_B=torch.ones(1, dtype=torch.bool).numpy()),
            input_ids=torch.tensor([[3, 4]]),
            cache=DynamicCache(config=moe.model.config),
        )


@pytest.mark.parametrize("is_decode", [False, True])
def test_a_pass_that_drops_the_cache_ends_the_request_with_an_error(moe, is_decode):
    stock = moe.model.forward

    @wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if (kwargs["input_ids"].shape[1] == 1) == is_decode:
            kwargs[CACHE] = None
        return stock(*args, **kwargs)

    moe.model.forward = forward
    engine = make_engine(moe, max_batch=2, prefix_cache="64MiB")
    clients = [Client(engine, prompt) for prompt in PROMPTS]
    run_all(engine, *clients)
    for client in clients:
        assert isinstance(client.error, UnsupportedModelError)
        assert "left the KV cache without its tokens" in str(client.error)


def test_a_recurrent_state_is_there_or_not():
    cache = DynamicCache()
    layer = LinearAttentionLayer()
    cache.layers = [layer]
    assert not has_tokens(cache, 3)
    layer.update_conv_state(torch.ones(1, 2, 4))
    assert has_tokens(cache, 3)
