"""Options: sizes, unknown names, bad values, and the config dict of the older MoE-Infinity."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from typing import Any

import pytest

from moe_infinity import ConfigError, MoE, OffloadConfig
from moe_infinity.predict.predictor import check_policy
from moe_infinity.sizes import parse_size
from moe_infinity.system.machine import machine_memory_bytes
from moe_infinity.tools.simulator.baselines import BASELINES

OLDER_KEYS_WITHOUT_EFFECT = {
    "offload_path": "/tmp/offload",
    "device_memory_ratio": 0.75,
    "trace_capacity": 1000,
    "trace_path": "trace.bin",
    "num_threads": 8,
}


def options(config: Any = None, **given: Any) -> OffloadConfig:
    """What `MoE(...)` checks before it loads anything."""
    made = OffloadConfig.from_options(config, given)
    check_policy(made)
    return made


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0), (8_000_000_000, 8_000_000_000), ("123", 123), (" 7 B ", 7),
        ("500 MB", 500_000_000), ("500MB", 500_000_000), ("1kb", 1000), ("1KiB", 1024),
        ("8GiB", 8 << 30), ("8gib", 8 << 30), ("0.5 GiB", 1 << 29), ("2TiB", 2 << 40),
        ("25%", 1000), ("25 %", 1000), ("12.5%", 500), ("100%", 4000), ("0%", 0),
    ],
)  # fmt: skip
def test_sizes_are_bytes_units_or_a_share_of_the_experts(text, num_bytes):
    assert parse_size(text, whole_bytes=4000) == num_bytes


@pytest.mark.parametrize(
    "text",
    ["", " ", "GiB", "eight GiB", "8 XiB", "-8GiB", -1, "25%%", "%", "1e9", "nan", "8,5GiB", True,
     [], {}, "8GiB 2", "inf"],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_examples_of_what_is(text):
    with pytest.raises(ConfigError, match="8GiB"):
        parse_size(text, whole_bytes=4000)


def test_the_defaults_are_valid_and_frozen():
    config = options()
    assert config == OffloadConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.policy = "lfu"  # type: ignore[misc]


@pytest.mark.parametrize("given", [{"polcy": "lfu"}, {"gpu": "cuda"}, {"Policy": "lru"}])
def test_an_unknown_option_is_named_with_those_that_exist(given):
    with pytest.raises(ConfigError, match=rf"{next(iter(given))}.*host_memory.*policy"):
        options(**given)
    with pytest.raises(ConfigError, match=next(iter(given))):
        options(given)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy", "no-such-policy"), ("policy", None), ("policy", 3), ("policy", ["lru"]),
        ("dtype", "int8"), ("dtype", None), ("experts_implementation", "batched"),
        ("host_memory", "lots"), ("host_memory", True), ("host_memory", -5), ("host_memory", [1]),
        ("device", "gpu"), ("device", "cuda:"), ("device", None), ("device", 0),
        ("device", "cuda:0,"), ("device", "cuda,cuda:1"), ("device", "cuda:0,cpu"),
        ("device", "cuda:0,cuda:1"),
        ("device_memory", "lots"), ("device_memory", "1GiB,1GiB"), ("device_memory", True),
        ("num_read_threads", 0), ("num_read_threads", -1), ("num_read_threads", "two"),
        ("num_read_threads", 1.5), ("num_read_threads", None),
        ("prefetch", "yes"), ("early_router", 1), ("stream_layers", 0), ("history", 3),
        ("without", "token"), ("without", ["tokens"]), ("without", [["token"]]),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_where_the_option_is_made(name, value):
    with pytest.raises(ConfigError) as caught:
        options(**{name: value})
    assert repr(value) in str(caught.value)


def test_a_bad_choice_is_answered_with_the_choices():
    with pytest.raises(ConfigError, match=r"'no-such-policy'.*lru.*lfu"):
        options(policy="no-such-policy")


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_of_the_simulator_is_refused_with_the_policies_of_the_engine(name):
    with pytest.raises(ConfigError, match=rf"'{name}'.*lru.*simulate.*simulator only"):
        options(policy=name)


@pytest.mark.parametrize(
    "bad",
    [
        {"policy": "no-such-policy"}, {"policy": "neighbor"}, {"policy": "lru", "prefetch": True},
        {"early_router": True}, {"policy": "lru", "history": "file.npz"}, {"without": ["tokens"]},
        {"dtype": "int8"}, {"polcy": "lru"},
    ],
)  # fmt: skip
def test_a_model_refuses_bad_options_before_it_looks_for_a_checkpoint(bad):
    with pytest.raises(ConfigError):
        MoE("no-such-folder", **bad)


def test_making_a_config_needs_neither_torch_nor_numpy():
    code = "import sys, moe_infinity; moe_infinity.OffloadConfig(); print(*sys.modules)"
    command = [sys.executable, "-c", code]
    modules = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "numpy"} & {*modules}


def test_keyword_options_come_on_top_of_a_config():
    base = OffloadConfig(policy="lfu", host_memory="1GiB")
    assert options(base, host_memory="2GiB") == OffloadConfig(policy="lfu", host_memory="2GiB")
    assert options({"policy": "lfu", "host_memory": 5}, policy="lru").policy == "lru"
    assert base == OffloadConfig(policy="lfu", host_memory="1GiB")


@pytest.mark.parametrize("name", OLDER_KEYS_WITHOUT_EFFECT)
def test_a_key_of_the_older_config_without_effect_is_answered_by_a_warning(name):
    """The warning names the key, says what replaces it or what to do, and nothing else changes."""
    with pytest.warns(UserWarning, match=rf"{name}.*(use|remove|instead)") as caught:
        config = options({name: OLDER_KEYS_WITHOUT_EFFECT[name]})
    assert len(caught) == 1
    assert config == OffloadConfig()


def test_the_older_share_of_device_memory_is_honoured_where_there_is_a_device(monkeypatch):
    monkeypatch.setattr("moe_infinity.memory.cuda.device_memory_bytes", lambda device: 1 << 30)
    assert options({"device_memory_ratio": 0.75}).device_memory == 3 << 28


@pytest.mark.parametrize("ratio", [75, 0, -1, "0.5", None, True, float("nan")])
@pytest.mark.parametrize("device_bytes", [None, 1 << 30])
def test_an_older_share_that_is_none_is_refused_with_and_without_a_device(
    monkeypatch, ratio, device_bytes
):
    monkeypatch.setattr("moe_infinity.memory.cuda.device_memory_bytes", lambda device: device_bytes)
    with pytest.raises(ConfigError, match="device_memory_ratio must be above 0"):
        options({"device_memory_ratio": ratio})


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_a_device_is_named_as_torch_names_it(device):
    assert options(device=device).device == device


def test_the_older_prefetch_switch_is_honoured():
    assert options({"prefetch": True}).prefetch
    assert not options({"prefetch": False}).prefetch


def test_asking_the_router_early_is_for_prefetch():
    assert options(early_router=True, prefetch=True).early_router
    with pytest.raises(ConfigError, match="early_router serves prefetch=True"):
        options(early_router=True)


def test_a_policy_that_predicts_nothing_cannot_prefetch():
    with pytest.raises(ConfigError, match="lru predicts nothing.*use activation-aware"):
        options(policy="lru", prefetch=True)


def test_an_ablation_keeps_no_history():
    with pytest.raises(ConfigError, match="ablation"):
        options(history="file.npz", without=("token",))


def test_only_a_policy_of_factors_can_leave_some_out():
    with pytest.raises(ConfigError, match="no factors"):
        options(policy="lru", without=("token",))


def test_only_a_policy_that_learns_keeps_a_history():
    assert options(history="file.npz").history == "file.npz"
    with pytest.raises(ConfigError, match="lru keeps no history, activation-aware does"):
        options(history="file.npz", policy="lru")


def test_the_older_share_of_host_memory_is_honoured():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = options({"host_memory_ratio": 0.25})
    assert config.host_memory == int(0.25 * machine_memory_bytes())


@pytest.mark.parametrize("ratio", [0, -0.5, 1.01, "half", None, True])
def test_an_impossible_share_of_host_memory_is_refused(ratio):
    with pytest.raises(ConfigError, match="host_memory_ratio"):
        options({"host_memory_ratio": ratio})


def test_the_whole_older_config_gives_one_warning_per_key_and_a_model(tiny_checkpoint):
    older = OLDER_KEYS_WITHOUT_EFFECT | {"host_memory_ratio": 0.5}
    with pytest.warns(UserWarning, match="option") as caught, MoE(tiny_checkpoint, older) as moe:
        assert moe.config.host_memory == int(0.5 * machine_memory_bytes())
    said = [str(warning.message) for warning in caught]
    assert len(said) == len(OLDER_KEYS_WITHOUT_EFFECT)
    assert all(any(key in text for text in said) for key in OLDER_KEYS_WITHOUT_EFFECT)


def test_a_warning_points_at_the_line_that_made_the_model(tiny_checkpoint):
    with pytest.warns(UserWarning, match="offload_path") as caught:
        MoE(tiny_checkpoint, {"offload_path": "/tmp/x"}).close()
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_a_json_file_is_accepted_as_config(tmp_path, tiny_checkpoint, kind):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"policy": "lfu", "host_memory": "50%"}))
    with MoE(tiny_checkpoint, kind(file), host_memory="25%") as moe:
        assert moe.config == OffloadConfig(policy="lfu", host_memory="25%")


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '"lru"', "null", "\x00"])
def test_a_config_file_without_options_in_it_is_refused_by_name(tmp_path, text):
    file = tmp_path / "options.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"options\.json"):
        options(file)


def test_a_config_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"options\.json"):
        options(tmp_path / "options.json")


@pytest.mark.parametrize("config", [42, ["policy"], 0.5, object()])
def test_a_config_of_another_kind_is_refused(config):
    with pytest.raises(ConfigError):
        options(config)
