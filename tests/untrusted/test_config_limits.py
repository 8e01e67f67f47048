"""Numbers, types and depth of config.json, generation_config.json and the tokenizer's files are
refused in one line that names file, key, value and limit, before anything is made of them."""

from __future__ import annotations

import functools
import json
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_infinity import CheckpointError, MoE, MoEInfinityError, UnsupportedModelError
from moe_infinity.cli.inspection import inspect_checkpoint
from moe_infinity.loading.kind import find_kind, load_tokenizer
from moe_infinity.untrusted import config_limits
from moe_infinity.untrusted.config_limits import (
    GENERATION,
    MODEL,
    NumberRange,
    check_config,
    check_generation_config,
    few_modules,
    read_object,
)
from tests.conftest import save_tokenizer

DEEP: list[Any] = functools.reduce(lambda inner, _: [inner], range(33), [])
FILE = Path("config.json")


def written(file: Path, **changes: Any) -> Path:
    content = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps(content | changes), "utf-8")
    return file


# configs


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers .* 1000000000, .* from 1 to 1,024"),
        ({"num_hidden_layers": [10**9]}, "num_hidden_layers has 1000000000"),
        ({"num_hidden_layers": [[[1]]]}, "num_hidden_layers is"),
        ({"num_attention_heads": 0}, "num_attention_heads has 0, expected a whole number from 1"),
        ({"hidden_size": -8}, "hidden_size has -8"),
        ({"hidden_size": 32.5}, "hidden_size has 32.5"),
        ({"vocab_size": 10**12}, "vocab_size has 1000000000000"),
        ({"hidden_act": "nope"}, "hidden_act has 'nope', expected an activation"),
        ({"hidden_act": 3}, "hidden_act has 3"),
        ({"rope_theta": "x"}, "rope_theta has 'x'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "x"}}, "rope_parameters.rope"),
        ({"num_experts": 10**15}, "num_experts has 1000000000000000"),
        ({"num_experts": 60_000, "num_hidden_layers": 1000}, "layers of 60000 experts"),
        ({"text_config": {"num_experts": 10**15}}, "text_config.num_experts"),
        ({"parts": [{"a": {"n_layer": -1}}]}, r"parts.a.n_layer has -1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings has 'yes', expected true or false"),
        ({"anything": 10**30}, "anything has 1000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps has nan"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id is"),
        ({"num_layers\x1b[2J\u202e": 10**30}, r"num_layers\\x1b\[2J\\u202e has"),
    ],
)  # fmt: skip
def test_a_number_that_no_model_has_is_named_with_its_limit(
    tiny_checkpoint, copy_of, changes, said, monkeypatch
):
    folder = copy_of(tiny_checkpoint)
    file = written(folder / "config.json", **changes)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", None)  # nothing is made of it
    for open_it in (MoE, inspect_checkpoint, find_kind):
        with pytest.raises(CheckpointError, match=said) as raised:
            open_it(str(folder))
        assert str(raised.value).startswith(f"{file}: ")
        assert "\n" not in str(raised.value)


@pytest.mark.sample(8)
@pytest.mark.parametrize("first", range(8))
def test_no_default_of_a_class_is_refused(first):
    num_checked = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in [*CONFIG_MAPPING.keys()][first::8]:
            make = CONFIG_MAPPING[name]
            with suppress(Exception):  # of parts that have no defaults
                text = json.dumps(make().to_dict(), default=str)
                num_checked += 1
                check_config(Path(make.__name__), json.loads(text), trust_remote_code=False)
                num_allowed = num_checked
            assert num_checked == num_allowed, make
    assert num_checked > 300 // 8


def test_every_rule_allows_its_bounds_and_nothing_beyond():
    names = {  # a key of each pattern
        "num_layers": 1024, "n_mtp_layers": 1024, "n_routed_experts": 1 << 16, "num_beams": 4096,
        "num_experts_per_tok": 4096, "num_attention_heads": 65536, "num_key_value_heads": 65536,
        "d_model": 1 << 24, "moe_intermediate_size": 1 << 27, "v_head_dim": 1 << 27, "top_p": 1,
        "max_position_embeddings": 1e30, "sliding_window": 1 << 62, "rope_theta": 1e15,
        "layer_norm_eps": 1, "attention_dropout": 1, "initializer_factor": 1e9, "top_k": 1 << 30,
        "eos_token_id": 1 << 27, "temperature": 1e4, "repetition_penalty": 1e3,
        "length_penalty": 1e9, "max_length": 1 << 40, "no_repeat_ngram_size": 64,
    }  # fmt: skip
    for key, most in names.items():
        check_config(FILE, {key: most}, trust_remote_code=False)
        with pytest.raises(CheckpointError, match=key):
            check_config(FILE, {key: most * 2}, trust_remote_code=False)
    limited = [rule for rule in MODEL + GENERATION if isinstance(rule.limit, NumberRange)]
    untried = [r for r in limited if not any(r.keys.fullmatch(name) for name in names)]
    assert [rule.keys.pattern for rule in untried] == ["bad_words_ids|force_words_ids"]


def test_a_file_that_is_too_deep_large_or_long_is_refused(tmp_path):
    file = tmp_path / "config.json"
    for text, said in (
        ("[" * 100_000, "nested more than 16 deep"),
        ('{"a":' * 17 + "1" + "}" * 17, "nested more than 16 deep"),
        (json.dumps({"a": [0] * 200_001}), "more than 200000 values"),
        (" " * (17 << 20), "expected at most"),
    ):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=said):
            read_object(file)
    file.write_text('{"a":' * 16 + "1" + "}" * 16)
    assert list(read_object(file)) == ["a"]


def test_a_model_of_too_many_modules_is_not_built(monkeypatch):
    """Whatever key of its config asks for them."""
    monkeypatch.setattr(config_limits, "MAX_MODULES", 100)
    with few_modules("folder"), torch.device("meta"):
        nn.Sequential(*(nn.Identity() for _ in range(100)))
    with (
        pytest.raises(CheckpointError, match="folder: .* more than 100 modules"),
        few_modules("folder"),
    ):
        nn.Sequential(*(nn.Identity() for _ in range(101)))
    nn.Sequential(*(nn.Identity() for _ in range(101)))  # the limit is gone


# kernels of the hub


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_implementation": "owner/repo"},
        {"_attn_implementation": "paged|owner/repo@main:name"},
        {"_attn_implementation_internal": "owner/repo"},
        {"experts_implementation": "owner/repo"},
        {"text_config": {"attn_implementation": "owner/repo"}},
        {"attn_implementation": {"text_config": "owner/repo"}},
    ],
    ids=str,
)
def test_a_kernel_of_the_hub_needs_trust(tiny_checkpoint, copy_of, changes):
    folder = copy_of(tiny_checkpoint)
    file = written(folder / "config.json", **changes)
    with pytest.raises(UnsupportedModelError, match="kernel of the hub.*\nhint: --trust-remote"):
        MoE(folder)
    check_config(file, read_object(file), trust_remote_code=True)


# generation_config.json


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": "hot"}, {"temperature": -1}, {"repetition_penalty": 0}, {"num_beams": 0},
        {"num_beams": 10**9}, {"bad_words_ids": [3]}, {"bad_words_ids": "x"}, {"top_p": 2},
        {"bad_words_ids": [["x"]]}, {"no_repeat_ngram_size": -1}, {"do_sample": "yes"},
        {"max_new_tokens": [3]}, {"guidance_scale": float("inf")}, {"eos_token_id": [None]},
    ],
    ids=str,
)  # fmt: skip
def test_a_setting_that_cannot_be_kept_is_named(tiny_checkpoint, copy_of, changes):
    folder = copy_of(tiny_checkpoint)
    (folder / "generation_config.json").unlink(missing_ok=True)
    file = written(folder / "generation_config.json", **changes)
    with pytest.raises(CheckpointError, match=f"{file.name}: {next(iter(changes))} .*, expected"):
        find_kind(str(folder))


def test_settings_that_are_in_use_are_kept():
    for settings in (
        json.loads(transformers.GenerationConfig().to_json_string()),
        {"temperature": 0.0, "top_k": -1, "eos_token_id": [2, 3], "pad_token_id": -1},
        {"bad_words_ids": [[3, 4], [5]], "suppress_tokens": [1, 2], "max_length": 1 << 30},
        {"repetition_penalty": 1.05, "do_sample": True, "cache_implementation": "hybrid"},
    ):
        check_generation_config(FILE, settings)


# tokenizers


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": None}, "tokenizer.json: model is None"),
        ({"model": {}}, "tokenizer.json: model.vocab is None"),
        ({"added_tokens": None}, "tokenizer.json: added_tokens is None"),
        ({"added_tokens": [{"id": 4_000_000_000}]}, "added_tokens is 4000000000, .* 16,777,215"),
        ({"model": {"vocab": {"a\x1b": 4_000_000_000}}}, r"'a\\x1b' of model.vocab is 4000000000"),
        ({"normalizer": DEEP}, "32 deep"),
    ],
    ids=["no model", "no vocab", "no added", "id", "vocab", "deep"],
)  # fmt: skip
def test_a_tokenizer_that_would_end_the_process_is_refused(
    tiny_checkpoint, copy_of, changes, said, monkeypatch
):
    folder = copy_of(tiny_checkpoint)
    save_tokenizer(folder)
    written(folder / "tokenizer.json", **changes)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", None)
    with pytest.raises(MoEInfinityError, match=said):
        load_tokenizer(str(folder), config_from=None, trust_remote_code=False)


def test_ids_of_other_files_are_looked_at(tiny_checkpoint, copy_of):
    folder = copy_of(tiny_checkpoint)
    save_tokenizer(folder)
    for name, changes in (
        ("tokenizer_config.json", {"added_tokens_decoder": {"99999999": {"content": "x"}}}),
        ("vocab.json", {"x": 1 << 30}),
    ):
        before = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
        written(folder / name, **changes)
        with pytest.raises(CheckpointError, match=f"{name}: .* expected a whole number"):
            load_tokenizer(str(folder), config_from=None, trust_remote_code=False)
        (folder / name).write_bytes(before)


@pytest.mark.parametrize(("template", "is_none"), [("", True), (" \n", True), ("{{ 1 }}", False)])
def test_a_blank_chat_template_is_none(tiny_checkpoint, copy_of, template, is_none):
    """A server would answer each chat from an empty prompt."""
    folder = copy_of(tiny_checkpoint)
    save_tokenizer(folder)
    written(folder / "tokenizer_config.json", chat_template=template)
    found = load_tokenizer(str(folder), config_from=None, trust_remote_code=False)
    assert (found.chat_template is None) is is_none
