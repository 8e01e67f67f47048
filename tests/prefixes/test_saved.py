"""A prefix is computed once; what is generated behind it is what is generated without it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from moe_infinity import ClosedError, ConfigError, MoE, OutputError, UnsupportedModelError
from moe_infinity.memory.room import Room
from moe_infinity.prefixes.saved import Prefix
from tests.conftest import make_model
from tests.prefixes.tiny_models import (
    KINDS,
    NUM_TRIED,
    RECURRENT,
    TEXT,
    answer,
    assert_same,
    computed,
    save_tiny,
)
from tests.server.driving import words
from tests.sweep.served import ORIGINAL, longrope

pytestmark = [pytest.mark.arithmetic, pytest.mark.timeout(120)]
NUM_PREFIX = 70
PROMPT = TEXT[:100]


@pytest.fixture(scope="module", params=KINDS)
def moe(request, tmp_path_factory) -> Iterator[MoE]:
    folder = save_tiny(request.param, tmp_path_factory.mktemp(request.param))
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        yield moe
        moe.check_invariants()


@pytest.fixture(scope="module")
def plain(tiny_checkpoint) -> Iterator[MoE]:
    with MoE(tiny_checkpoint, host_memory="50%", dtype="float32") as moe:
        yield moe
        moe.check_invariants()


@pytest.fixture(scope="module")
def prefix(plain, tmp_path_factory) -> Prefix:
    return plain.save_prefix(tmp_path_factory.mktemp("prefix") / "a.prefix", TEXT[:NUM_PREFIX])


def is_recurrent(moe: MoE) -> bool:
    return moe.model.config.model_type in RECURRENT


@pytest.mark.sample(3)
def test_a_prompt_goes_on_from_a_file_again_and_again(moe, tmp_path):
    expected = answer(moe, PROMPT)
    eam = moe.request_eams()[0]
    moe.save_prefix(tmp_path / "a.prefix", TEXT[:NUM_PREFIX])
    prefix = moe.load_prefix(tmp_path / "a.prefix")
    assert prefix.token_ids == TEXT[:NUM_PREFIX]
    assert prefix.num_bytes > 0
    for _ in range(2):
        before = computed(moe)
        assert_same(answer(moe, PROMPT, prefix=prefix), expected)
        assert computed(moe) - before == len(PROMPT) - NUM_PREFIX
        (found,) = moe.request_eams()
        np.testing.assert_array_equal(found.prefill, eam.prefill)
    other = [*TEXT[:NUM_PREFIX], *TEXT[200:233]]
    assert_same(answer(moe, other, prefix=prefix), answer(moe, other))


@pytest.mark.sample(3)
def test_a_prompt_that_parts_from_the_prefix_shares_its_beginning(moe, tmp_path):
    """Recurrent layers have no state there: they refuse."""
    prefix = moe.save_prefix(tmp_path / "a.prefix", TEXT[:NUM_PREFIX])
    for prompt, num_shared in (
        ([*TEXT[:50], *TEXT[200:221]], 50),
        ([*TEXT[:48], *TEXT[210:211]], 48),
        (TEXT[:NUM_PREFIX], NUM_PREFIX - 1),
        (TEXT[:20], 19),
    ):
        if is_recurrent(moe):
            with pytest.raises(ConfigError, match=f"has {num_shared} of the prefix's 70 tokens"):
                answer(moe, prompt, prefix=prefix)
            continue
        expected = answer(moe, prompt)
        before = computed(moe)
        assert_same(answer(moe, prompt, prefix=prefix), expected)
        one_is_decoding = len(prompt) - num_shared == 1
        assert computed(moe) - before == (0 if one_is_decoding else len(prompt) - num_shared)


@pytest.mark.sample(3)
def test_a_prefix_of_several_passes_is_the_same(moe, tmp_path, monkeypatch):
    expected = answer(moe, TEXT[:200])
    monkeypatch.setattr(Room, "tokens_at_once", lambda self, num_new, context, most: 40)
    before = computed(moe)
    prefix = moe.save_prefix(tmp_path / "a.prefix", TEXT[:150])
    assert computed(moe) - before == 150 + NUM_TRIED * is_recurrent(moe)
    monkeypatch.undo()
    assert_same(answer(moe, TEXT[:200], prefix=prefix), expected)
    if not is_recurrent(moe):
        assert_same(answer(moe, TEXT[:200], prefix=prefix, prefill_chunk_size=20), expected)


def test_text_streams_behind_a_prefix_of_text(plain, tmp_path):
    system = words(TEXT[:40])
    plain.save_prefix(tmp_path / "a.prefix", system)
    prefix = plain.load_prefix(str(tmp_path / "a.prefix"))
    text = words(TEXT[:60])
    expected = "".join(plain.stream(text, max_new_tokens=9, do_sample=False))
    before = computed(plain)
    found = plain.stream(text, max_new_tokens=9, do_sample=False, prefix=prefix)
    assert "".join(found) == expected
    assert computed(plain) - before == 20
    assert "".join(plain.stream(text, max_new_tokens=9, do_sample=False, prefix=None)) == expected


@pytest.mark.parametrize(
    "prompt", [TEXT[:40], torch.tensor(TEXT[:40]), {"input_ids": torch.tensor([TEXT[:40]])}]
)
def test_a_prompt_is_text_ids_or_what_a_tokenizer_returns(prompt, plain, tmp_path):
    assert plain.save_prefix(tmp_path / "a.prefix", prompt).token_ids == TEXT[:40]


@pytest.mark.parametrize("prompt", [[], "", [5, -1], [5, 128], [0.5], [[5], [6]], {"a": 1}, 7])
def test_no_prefix_is_made_of_anything_else(prompt, plain, tmp_path):
    with pytest.raises((ConfigError, KeyError)):
        plain.save_prefix(tmp_path / "a.prefix", prompt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({"input_ids": torch.tensor([PROMPT, PROMPT])}, "one sequence"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 4, 32)}, "one sequence"),
        ({"attention_mask": torch.tensor([[0, *[1] * 99]])}, "no padding"),
        ({"num_beams": 2}, "one token after another"),
        ({"prompt_lookup_num_tokens": 3}, "one token after another"),
        ({"num_return_sequences": 2, "do_sample": True}, "one answer"),
        ({"use_cache": False}, "the cache that it brings"),
        ({"input_ids": torch.tensor([[9, *PROMPT]])}, "has 0 of the prefix's 70 tokens"),
    ],
)
def test_what_has_no_prefix_is_refused(arguments, wanted, plain, prefix):
    with pytest.raises(ConfigError, match=wanted):
        plain.generate(**({"input_ids": torch.tensor([PROMPT]), "prefix": prefix} | arguments))


def test_after_a_refusal_the_prefix_is_as_good_as_before(plain, prefix):
    with pytest.raises(ConfigError, match="one sequence"):
        plain.generate(input_ids=torch.tensor([PROMPT, PROMPT]), prefix=prefix)
    with pytest.raises(ConfigError, match="the cache that it brings"):
        plain.generate(input_ids=torch.tensor([PROMPT]), prefix=prefix, use_cache=False)
    assert_same(answer(plain, PROMPT, prefix=prefix), answer(plain, PROMPT))


def test_a_prefix_belongs_to_the_object_that_loaded_it(plain, tiny_checkpoint, tmp_path):
    plain.save_prefix(tmp_path / "a.prefix", TEXT[:NUM_PREFIX])
    with MoE(tiny_checkpoint, dtype="float32") as other:
        prefix = other.load_prefix(tmp_path / "a.prefix")
        with pytest.raises(ConfigError, match="loaded by another model"):
            answer(plain, PROMPT, prefix=prefix)
        assert_same(answer(other, PROMPT, prefix=prefix), answer(plain, PROMPT))


def test_a_model_that_cannot_go_on_says_so_before_it_computes(tmp_path):
    with (
        MoE(save_tiny("jamba", tmp_path / "model"), dtype="float32") as moe,
        pytest.raises(UnsupportedModelError, match="prefixes of this model cannot be kept"),
    ):
        moe.save_prefix(tmp_path / "a.prefix", TEXT[:40])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_beyond_the_first_rotary_embedding_all_is_computed(tmp_path, caplog):
    """LongRoPE computes the keys of a long prompt with other rotations, from its first token on."""
    rope = longrope(4) | {"rope_theta": 10000.0}
    make_model(rope_parameters=rope).save_pretrained(tmp_path / "model")
    with MoE(tmp_path / "model", dtype="float32") as moe:
        prefix = moe.save_prefix(tmp_path / "a.prefix", TEXT[:20])
        usual = TEXT[: ORIGINAL - 1]
        settings = {"max_new_tokens": 1}
        assert_same(answer(moe, usual, prefix=prefix, **settings), answer(moe, usual, **settings))
        assert "another rotary embedding" not in caplog.text
        long = TEXT[: ORIGINAL + 4]
        assert_same(answer(moe, long, prefix=prefix), answer(moe, long))
        assert "another rotary embedding" in caplog.text
        with pytest.raises(ConfigError, match="beyond the original length"):
            moe.save_prefix(tmp_path / "b.prefix", long)


def test_the_models_kind_of_cache_is_no_obstacle(plain, tmp_path, monkeypatch):
    prefix = plain.save_prefix(tmp_path / "a.prefix", TEXT[:NUM_PREFIX])
    expected = answer(plain, PROMPT)
    settings = plain.model.generation_config
    monkeypatch.setattr(settings, "cache_implementation", "dynamic")
    assert_same(answer(plain, PROMPT, prefix=prefix), expected)
    with pytest.raises(ValueError, match="cache_implementation"):
        answer(plain, PROMPT, prefix=prefix, cache_implementation="static")


def test_a_closed_model_saves_none(tiny_checkpoint, tmp_path):
    with MoE(tiny_checkpoint, dtype="float32") as moe:
        pass
    with pytest.raises(ClosedError):
        moe.save_prefix(tmp_path / "a.prefix", TEXT[:40])
    assert list(tmp_path.iterdir()) == []


SAVER = """
import sys
from moe_infinity import MoE
with MoE(sys.argv[1], dtype="float32") as moe:
    for turn in range(15):
        moe.save_prefix(sys.argv[2], [5] * (40 + turn))
"""


@pytest.mark.slow
def test_two_processes_may_write_one_file(plain, tmp_path):
    """Whoever reads meanwhile finds one of theirs, whole."""
    file = tmp_path / "a.prefix"
    seen = set()
    with subprocess.Popen([sys.executable, "-c", SAVER, plain.checkpoint, str(file)]) as saver:
        while not file.exists() and saver.poll() is None:
            time.sleep(0.02)
        while saver.poll() is None:
            (token_id,) = set(plain.load_prefix(file).token_ids)
            seen.add(token_id)
            plain.save_prefix(file, [6] * 40)
    assert saver.returncode == 0
    assert 5 in seen
    assert [path.name for path in tmp_path.iterdir()] == ["a.prefix"]


def test_no_folder_is_said_before_anything_is_computed(plain, tmp_path):
    before = computed(plain)
    with pytest.raises(OutputError, match="does not exist"):
        plain.save_prefix(tmp_path / "nowhere" / "a.prefix", TEXT[:40])
    assert computed(plain) == before


@pytest.mark.parametrize("is_changed_later", [True, False])
def test_a_model_with_other_weights_takes_no_prefix(tiny_checkpoint, tmp_path, is_changed_later):
    """Changed in place, as an adapter is merged, before or after the file was read."""
    file = tmp_path / "a.prefix"
    with MoE(tiny_checkpoint, dtype="float32") as moe:
        prefix = moe.save_prefix(file, TEXT[:40])
        with torch.no_grad():
            moe.model.model.layers[0].self_attn.q_proj.weight.mul_(2)
        if is_changed_later:
            with pytest.raises(ConfigError, match="not those that this prefix was computed with"):
                answer(moe, TEXT[:60], prefix=prefix)
        else:
            with pytest.raises(ConfigError, match="weights in memory"):
                moe.load_prefix(file)
        prefix = moe.save_prefix(file, TEXT[:40])
        assert_same(answer(moe, TEXT[:60], prefix=prefix), answer(moe, TEXT[:60]))


def test_a_weight_that_changed_behind_its_first_values_takes_no_prefix(tiny_checkpoint, tmp_path):
    """Some values of each weight are compared, and how often it was changed in place."""
    with MoE(tiny_checkpoint, dtype="float32") as moe:
        saved = moe.save_prefix(tmp_path / "a.prefix", TEXT[:40])
        loaded = moe.load_prefix(tmp_path / "a.prefix")
        with torch.no_grad():
            moe.model.model.layers[1].self_attn.v_proj.weight[5, 7:] *= 2
        for prefix in (saved, loaded):
            with pytest.raises(ConfigError, match="not those that this prefix was computed with"):
                answer(moe, TEXT[:60], prefix=prefix)
        prefix = moe.save_prefix(tmp_path / "b.prefix", TEXT[:40])
        assert_same(answer(moe, TEXT[:60], prefix=prefix), answer(moe, TEXT[:60]))


def test_memory_is_planned_for_what_windows_pass_over(tmp_path, monkeypatch):
    folder = save_tiny("gpt_oss", tmp_path / "model")
    seen = []

    def noted(method: Any) -> Any:
        def call(room: Room, *args: Any, **kwargs: Any) -> Any:
            seen.append((method.__name__, room.keeps_windows))
            return method(room, *args, **kwargs)

        return call

    for method in (Room.make, Room.tokens_at_once):
        monkeypatch.setattr(Room, method.__name__, noted(method))
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        moe.save_prefix(tmp_path / "a.prefix", TEXT[:NUM_PREFIX])
        assert set(seen) == {("make", True), ("tokens_at_once", True)}
        assert not moe.engine.room.keeps_windows
        moe.engine.room.keeps_windows = True  # as in a server
        moe.load_prefix(tmp_path / "a.prefix")
        answer(moe, PROMPT, prefix=moe.load_prefix(tmp_path / "a.prefix"))
        assert moe.engine.room.keeps_windows
