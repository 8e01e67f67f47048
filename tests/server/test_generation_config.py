"""Each setting of transformers' GenerationConfig is kept, refused by name, or shapes no answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, WatermarkingConfig, set_seed

from moe_infinity import MoE
from moe_infinity.errors import ConfigError
from moe_infinity.server.engine import Engine
from moe_infinity.server.generation import Generation
from moe_infinity.server.sampling import Sampling
from tests.server.driving import GREEDY, answered, generated, make_engine

pytestmark = pytest.mark.arithmetic

PROMPT = [5, 6, 9, 100, 31]
LENGTH = 12
Values = dict[str, Any]


@pytest.fixture(scope="module")
def engine(moe: MoE) -> Engine:
    return make_engine(moe, max_batch=1)


@pytest.fixture(scope="module")
def plain(moe: MoE) -> list[int]:
    """What the model answers without further settings."""
    return generated(moe, PROMPT)


def set_all(moe: MoE, monkeypatch: pytest.MonkeyPatch, values: Values) -> None:
    for name, value in values.items():
        monkeypatch.setattr(moe.model.generation_config, name, value)


def kept(plain: list[int]) -> dict[str, Values]:
    """Settings that change this greedy answer; what ends an answer comes early in it."""
    first, second, third = plain[:3]
    return {
        "bad_words_ids": {"bad_words_ids": [[second], [third, plain[3]]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [first]},
        "encoder_no_repeat_ngram_size": {
            "encoder_no_repeat_ngram_size": 1,
            "sequence_bias": [[[PROMPT[0]], 1e4]],
        },
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 100.0},
        "eos_token_id": {"eos_token_id": [second, 0]},
        "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (1, 50.0)},
        "forced_eos_token_id": {"forced_eos_token_id": 78},
        "min_length": {"eos_token_id": [second], "min_length": len(PROMPT) + 4},
        "min_new_tokens": {"eos_token_id": [second], "min_new_tokens": 5},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 1, "sequence_bias": [[[first], 100.0]]},
        "remove_invalid_values": {"remove_invalid_values": True, "forced_eos_token_id": 78},
        "renormalize_logits": {"renormalize_logits": True, "suppress_tokens": [first]},
        "repetition_penalty": {"repetition_penalty": 50.0},
        "sequence_bias": {"sequence_bias": [[[first], -100.0], [[second, third], 100.0]]},
        "suppress_tokens": {"suppress_tokens": [first, third]},
        "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=100.0)},
    }


FILTERS: dict[str, Values] = {
    "do_sample": {},
    "epsilon_cutoff": {"epsilon_cutoff": 0.01},
    "eta_cutoff": {"eta_cutoff": 0.1},
    "min_p": {"min_p": 0.2},
    "temperature": {"temperature": 0.4},
    "top_h": {"top_h": 0.3},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.4},
    "typical_p": {"typical_p": 0.3},
}
REFUSED: dict[str, Any] = {
    "constraints": ["x"],
    "dola_layers": "low",
    "force_words_ids": [[5]],
    "guidance_scale": 1.5,
    "num_beams": 4,
    "penalty_alpha": 0.6,
    "token_healing": True,
}
APART = {
    "forced_bos_token_id",
    "max_length",
    "max_new_tokens",
    "max_time",
    "stop_strings",
}  # each has a test below
# Of beams or assistants, which are refused or do not change the text, and of how it is computed.
SHAPES_NOTHING: dict[str, Any] = {
    "assistant_confidence_threshold": 0.9,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 3,
    "bos_token_id": 7,
    "cache_config": {"nbits": 4},
    "cache_implementation": "static",
    "compile_config": CompileConfig(),
    "continuous_batching_config": None,
    "decoder_start_token_id": 7,
    "disable_compile": True,
    "diversity_penalty": 1.0,
    "early_stopping": True,
    "is_assistant": True,
    "length_penalty": 2.0,
    "low_memory": True,
    "max_cache_len": 64,
    "max_matching_ngram_size": 2,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "num_beam_groups": 2,
    "num_return_sequences": 3,
    "output_attentions": True,
    "output_hidden_states": True,
    "output_logits": True,
    "output_scores": True,
    "pad_token_id": 7,
    "prefill_chunk_size": 2,
    "prompt_lookup_num_tokens": 3,
    "return_dict_in_generate": True,
    "speculation_type": "dflash",
    "target_lookbehind": 3,
    "use_cache": False,
    "use_mtp": True,
}
METADATA = {"_commit_hash", "_from_model_config", "transformers_version"}


def test_every_setting_that_transformers_knows_is_in_a_table():
    tables = [kept([0] * LENGTH), FILTERS, REFUSED, APART, SHAPES_NOTHING, METADATA]
    names = [name for table in tables for name in table]
    known = {*vars(GenerationConfig()), "_commit_hash"}  # which transformers 5.24 no longer has
    assert sorted(names) == sorted(known)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", kept([0] * LENGTH))
def test_a_setting_of_the_checkpoint_gives_the_answer_of_generate(
    engine, moe, plain, monkeypatch, name
):
    values = kept(plain)[name]
    set_all(moe, monkeypatch, values)
    ids = torch.tensor([PROMPT])
    out = moe.generate(ids, max_new_tokens=LENGTH, do_sample=False)
    expected = out[0, len(PROMPT) :].tolist()
    assert expected != plain, "the setting should change this answer"
    client = answered(engine, PROMPT, max_new_tokens=LENGTH)
    made = client.running.ids[len(PROMPT) :]
    assert made == expected


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_of_the_checkpoint_gives_the_tokens_of_generate(engine, moe, monkeypatch, name):
    set_all(moe, monkeypatch, {"do_sample": True, "top_k": 0} | FILTERS[name])
    set_seed(3)
    out = moe.generate(torch.tensor([PROMPT]), max_new_tokens=LENGTH)
    client = answered(engine, PROMPT, sampling=Sampling(seed=3))
    assert client.running.ids == out[0].tolist()


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_a_penalty_of_the_checkpoint_counts_unless_the_request_has_its_own(
    engine, moe, plain, monkeypatch, name
):
    bias = {"sequence_bias": [[[plain[0]], 50.0]], "do_sample": False}  # it would be repeated
    set_all(moe, monkeypatch, bias)
    monkeypatch.setattr(moe.model.generation_config, name, 100.0, raising=False)
    client = answered(engine, PROMPT, max_new_tokens=LENGTH)
    assert client.running.ids[len(PROMPT) :].count(plain[0]) == 1
    asked: Values = {name: 0.0}
    own = answered(engine, PROMPT, max_new_tokens=LENGTH, sampling=Sampling(**asked))
    assert own.running.ids[len(PROMPT) :].count(plain[0]) == LENGTH


def test_a_checkpoint_that_does_not_sample_is_greedy_unless_asked(engine, moe, plain, monkeypatch):
    set_all(moe, monkeypatch, {"do_sample": False, "temperature": 0.7})
    client = answered(engine, PROMPT, sampling=Sampling(seed=1))
    assert client.running.ids[len(PROMPT) :] == plain
    warm = answered(engine, PROMPT, sampling=Sampling(seed=1, temperature=50.0))
    assert warm.running.ids[len(PROMPT) :] != plain


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_cannot_be_kept_is_refused_at_the_start(moe, monkeypatch, name):
    set_all(moe, monkeypatch, {name: REFUSED[name]})
    with pytest.raises(ConfigError, match=rf"\b{name}\b.*not served"):
        make_engine(moe)


def test_a_setting_that_transformers_refuses_is_refused_at_the_start(moe, monkeypatch):
    set_all(moe, monkeypatch, {"bad_words_ids": [[-1]]})
    with pytest.raises(ConfigError, match="bad_words_ids"):
        make_engine(moe)


def test_settings_that_shape_no_answer_change_none(engine, moe, plain, monkeypatch):
    set_all(moe, monkeypatch, SHAPES_NOTHING)
    client = answered(engine, PROMPT)
    assert client.running.ids[len(PROMPT) :] == plain


# Lengths


def test_a_stop_string_of_the_checkpoint_ends_an_answer(engine, moe, plain, monkeypatch):
    set_all(moe, monkeypatch, {"stop_strings": f"w{plain[3]}"})
    client = answered(engine, PROMPT, stop=("nowhere",))
    assert client.finish == "stop"
    assert client.running.ids[len(PROMPT) :] == plain[:4]


def test_the_time_of_an_answer_may_be_limited_by_the_checkpoint(engine, moe, monkeypatch):
    set_all(moe, monkeypatch, {"max_time": 1e-6})
    client = answered(engine, PROMPT)
    assert (client.finish, client.outputs[-1].num_generated) == ("length", 1)


def test_the_length_of_an_answer_is_the_checkpoints_if_it_says_one(moe, monkeypatch):
    generation = Generation(moe.model)
    assert generation.max_new_tokens(10) is None
    set_all(moe, monkeypatch, {"max_length": 30})
    assert generation.max_new_tokens(10) == 20
    set_all(moe, monkeypatch, {"max_new_tokens": 7})
    assert generation.max_new_tokens(10) == 7


def test_the_first_token_of_a_sequence_may_be_forced(engine, moe, monkeypatch):
    set_all(moe, monkeypatch, {"forced_bos_token_id": 77})
    client = answered(engine, PROMPT[:1])
    assert client.running.ids[1] == 77


# What requests say


def test_an_end_token_may_be_asked_for_or_ignored(engine, moe, plain, monkeypatch):
    stopped = answered(engine, PROMPT, sampling=Sampling(temperature=0, stop_token_ids=(plain[2],)))
    assert (stopped.running.ids[len(PROMPT) :], stopped.finish) == (plain[:3], "stop")
    set_all(moe, monkeypatch, {"eos_token_id": plain[2]})
    assert answered(engine, PROMPT, sampling=GREEDY).running.ids[len(PROMPT) :] == plain[:3]
    wish = Sampling(temperature=0, ignore_eos=True)
    assert answered(engine, PROMPT, sampling=wish).running.ids[len(PROMPT) :] == plain


def test_an_answer_has_the_least_tokens_that_were_asked_for(engine, moe, plain):
    wish = Sampling(temperature=0, stop_token_ids=(plain[1],), min_tokens=4)
    client = answered(engine, PROMPT, sampling=wish)
    with_end = {"eos_token_id": [plain[1]], "min_new_tokens": 4}
    out = moe.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=LENGTH, **with_end)
    assert client.running.ids == out[0].tolist()


def test_a_request_goes_before_the_checkpoint(engine, moe, plain, monkeypatch):
    set_all(moe, monkeypatch, {"repetition_penalty": 50.0, "min_p": 0.5, "min_new_tokens": 3})
    wish = Sampling(temperature=0, repetition_penalty=1.0, min_p=0.0, min_tokens=0)
    client = answered(engine, PROMPT, sampling=wish)
    assert client.running.ids[len(PROMPT) :] == plain
