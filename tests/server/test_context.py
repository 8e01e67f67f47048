"""The context of a server is the model's, as its rotary embedding stretches it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from moe_infinity.errors import CheckpointError
from moe_infinity.server.prompts import context_of

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
OF_LAYERS = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}


def model_with(**values: Any) -> Any:
    config = SimpleNamespace(**values)
    config.get_text_config = lambda decoder=None: config
    return SimpleNamespace(model=SimpleNamespace(config=config))


@pytest.mark.parametrize(
    ("values", "context"),
    [
        ({"max_position_embeddings": 640}, 640),
        ({"max_seq_len": 700}, 700),
        ({"max_position_embeddings": 640, "rope_parameters": YARN}, 2048),
        ({"max_position_embeddings": 4096, "rope_parameters": YARN}, 4096),
        ({"max_position_embeddings": 640, "rope_parameters": OF_LAYERS}, 2048),
        ({"max_position_embeddings": 640, "rope_parameters": DYNAMIC}, 1280),
        ({"max_position_embeddings": 640, "rope_scaling": {"type": "dynamic", "factor": 3}}, 1920),
        ({"max_position_embeddings": 640, "rope_parameters": LLAMA3}, 640),
    ],
)
def test_the_context_is_what_the_config_says(values, context):
    assert context_of(model_with(**values), None) == context
    assert context_of(model_with(**values), context - 1) == context - 1


def test_a_context_that_the_model_does_not_have_is_said_at_the_start(caplog):
    model = model_with(max_position_embeddings=640)
    with caplog.at_level(logging.WARNING):
        assert context_of(model, 2048) == 640
    assert "--max-context 2048" in caplog.text
    assert "640" in caplog.text


def test_dynamic_positions_have_no_end(caplog):
    assert (
        context_of(model_with(max_position_embeddings=640, rope_parameters=DYNAMIC), 9999) == 9999
    )
    assert not caplog.text


def test_a_context_that_nothing_names_has_to_be_given():
    assert context_of(model_with(), 100) == 100
    with pytest.raises(CheckpointError, match="--max-context"):
        context_of(model_with(), None)
