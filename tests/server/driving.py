"""Engines stepped by hand, and what their requests were delivered."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from moe_infinity import MoE
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.engine import Engine
from moe_infinity.server.sampling import Sampling
from moe_infinity.server.sequences import Output, Request, Running
from tests.closeness import margin

GREEDY = Sampling(temperature=0.0)
TOLERANCE = 1e-4  # of logits alone and among others, float32: sums in another order; seen 2e-5
IDS = Sampling(temperature=0.0, num_logprobs=2)  # with logprobs, so that outputs carry token ids
# Prompts.
LONG = [(7 * i + i // 5) % 97 + 3 for i in range(90)]
SHORT = [40, 41, 42, 43, 44]
OTHER = [12, 13, 90]


class Client:
    """One request and everything it was delivered."""

    def __init__(self, engine: Engine, prompt_ids: list[int], **wishes: Any) -> None:
        self.outputs: list[Output] = []
        self.prompt_ids = prompt_ids
        settings: dict[str, Any] = {"max_new_tokens": 12, "sampling": IDS} | wishes
        request = Request(prompt_ids=prompt_ids, **settings)
        self.running: Running = engine.running(request, self.outputs.append)
        engine.submit([self.running])

    @property
    def token_ids(self) -> list[int]:
        return [token.chosen.token_id for output in self.outputs for token in output.tokens]

    @property
    def logprobs(self) -> list[float]:
        tokens = [token for output in self.outputs for token in output.tokens]
        return [t.chosen.logprob for t in tokens if t.chosen.logprob is not None]

    @property
    def margin(self) -> float:
        """Of the logprobs of its two likeliest tokens, where they are nearest."""
        likeliest = [t.chosen.alternatives[:2] for out in self.outputs for t in out.tokens]
        return min((first[1] - second[1] for first, second in likeliest), default=math.inf)

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def finish(self) -> str | None:
        return self.outputs[-1].finish if self.outputs else None

    @property
    def error(self) -> BaseException | None:
        return self.outputs[-1].error if self.outputs else None

    @property
    def is_done(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].is_last


def assert_same_answer(client: Client, alone: Client) -> None:
    """Of two arithmetics: their logprobs are near, and no token was nearer to a tie."""
    assert alone.margin > 2 * TOLERANCE, "take another prompt"
    assert client.token_ids == alone.token_ids
    np.testing.assert_allclose(client.logprobs, alone.logprobs, atol=TOLERANCE)


def make_engine(moe: MoE, **bounds: Any) -> Engine:
    return Engine(moe, ServeConfig(**bounds))


def run_all(engine: Engine, *clients: Client) -> None:
    for _ in range(10_000):
        if all(client.is_done for client in clients):
            engine.check_invariants()
            return
        engine.step()
    raise AssertionError("requests that do not end")


def generated(moe: MoE, prompt_ids: list[int], **kwargs: Any) -> list[int]:
    """What generate() continues with, the end token left out. Greedy in float32 it is so far from
    ties that another arithmetic has to continue with the same."""
    kwargs = {"max_new_tokens": 12, "do_sample": False} | kwargs
    kwargs |= {"output_logits": True, "return_dict_in_generate": True}
    ids = torch.tensor([prompt_ids])
    out = moe.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **kwargs)
    if not kwargs["do_sample"] and moe.model.dtype == torch.float32:
        assert margin(torch.cat(out.logits)) > 2 * TOLERANCE, "take another prompt"
    tokens: list[int] = out.sequences[0, len(prompt_ids) :].tolist()
    return [t for t in tokens if t != moe.model.generation_config.eos_token_id]


def answered(engine: Engine, prompt_ids: list[int], **wishes: Any) -> Client:
    """A client whose request was answered."""
    client = Client(engine, prompt_ids, **wishes)
    run_all(engine, client)
    assert client.error is None
    return client


def cached(client: Client) -> int:
    return client.outputs[-1].num_cached


def words(token_ids: list[int]) -> str:
    """What these tokens are as text, with the tokenizer of the tests."""
    return " ".join(f"w{token_id}" for token_id in token_ids)


def leave(moe: MoE, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Say that so many bytes are free beside all slots, whatever steps take."""
    room = moe.engine.room
    room._first_pass_bytes = 0
    table = moe.engine.tiers[-1].table
    slot_bytes = moe.engine.tiers[-1].slots.slot_bytes
    monkeypatch.setattr(
        room.memory, "left", lambda: num_bytes + table.num_withdrawn * slot_bytes, raising=True
    )
