"""Files beside config.json that transformers or PEFT would read are looked at before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_infinity import CheckpointError, MoE, UnsupportedModelError
from moe_infinity.loading.kind import find_kind, load_tokenizer
from moe_infinity.untrusted import folder as folder_module
from moe_infinity.untrusted.config_limits import check_adapter_config
from moe_infinity.untrusted.folder import check_adapter, check_configs, check_processor
from tests.conftest import save_tokenizer
from tests.untrusted.test_config_limits import written

HUGE = 4_000_000_000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "config.5.0.json: num_hidden_layers has 1000000000"),
        ({"attn_implementation": "owner/repo"}, "config.5.0.json: .* kernel of the hub"),
    ],
    ids=str,
)
def test_a_config_for_this_version_is_looked_at(tiny_checkpoint, copy_of, changes, said):
    folder = copy_of(tiny_checkpoint)
    written(folder / "config.json", configuration_files=["config.5.0.json"])
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.5.0.json").write_text(json.dumps(content | changes))
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        MoE(folder)


@pytest.mark.parametrize("name", ["../config.5.0.json", "/etc/config.5.0.json", 3])
def test_a_config_for_this_version_is_in_the_folder(tiny_checkpoint, copy_of, name):
    folder = copy_of(tiny_checkpoint)
    written(folder / "config.json", configuration_files=[name])
    with pytest.raises(CheckpointError, match="configuration_files names .* no file of its folder"):
        check_configs(str(folder), trust_remote_code=False)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.5.0.json", {"model": {"vocab": {"x": HUGE}}, "added_tokens": []}),
        ("added_tokens.json", {"x": HUGE}),
        ("tekken.json", {"config": {"default_num_special_tokens": HUGE}}),
        ("tekken.json", {"vocab": [{"rank": HUGE}]}),
    ],
    ids=str,
)
def test_no_file_of_a_tokenizer_has_an_id_that_ends_the_process(
    tiny_checkpoint, copy_of, name, content
):
    folder = copy_of(tiny_checkpoint)
    save_tokenizer(folder)
    written(folder / "tokenizer_config.json", fast_tokenizer_files=["tokenizer.5.0.json"])
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"{name}: .* is 4000000000, expected"):
        load_tokenizer(str(folder), config_from=None, trust_remote_code=False)


@pytest.mark.parametrize(
    "changes",
    [{"r": 2 * HUGE}, {"rank_pattern": {"q_proj": HUGE}}, {"num_virtual_tokens": HUGE}],
    ids=str,
)
def test_an_adapter_has_no_rank_that_takes_all_memory(tiny_checkpoint, copy_of, changes):
    folder = copy_of(tiny_checkpoint)
    adapter: dict[str, Any] = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter | changes))
    with pytest.raises(CheckpointError, match="adapter_config.json: .* expected .* 4,096"):
        find_kind(str(folder))


def test_adapters_in_use_are_taken(tmp_path):
    for changes in (
        {"r": 1024, "lora_alpha": 2048, "lora_dropout": 0.05, "rank_pattern": {"^model.x": 4}},
        {"rank_dropout": 0.1, "module_dropout": 0.0, "use_effective_conv2d": False},
        {"effective_rank": 0.5, "target_modules": "all-linear", "layers_pattern": None},
        {"encoder_hidden_size": 4096, "num_virtual_tokens": 20, "token_dim": None},
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | changes))
        check_adapter_config(tmp_path / "adapter_config.json", changes)


def test_an_adapter_is_not_left_out_for_want_of_peft(tiny_checkpoint, copy_of, monkeypatch):
    folder = copy_of(tiny_checkpoint)
    adapter = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "revision": None}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    monkeypatch.setattr(folder_module, "is_peft_available", lambda: True)
    check_adapter(str(folder))
    monkeypatch.setattr(folder_module, "is_peft_available", lambda: False)
    with pytest.raises(UnsupportedModelError, match="needs PEFT\nhint: pip install peft"):
        MoE(folder)


@pytest.mark.parametrize(
    "content",
    [
        {"size": {"shortest_edge": 10**12, "longest_edge": 10**12}},
        {"min_pixels": 10**12},
        {"image_processor": {"size": {"height": 100_000, "width": 100_000}}},
        {"patch_size": 10**9},
    ],
    ids=str,
)
def test_a_processor_makes_no_picture_that_has_no_room(tmp_path, content):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="preprocessor_config.json: "):
        check_processor(str(tmp_path))


def test_processors_in_use_are_taken(tmp_path):
    for content in (
        # Qwen3-VL has numbers of pixels under these names.
        {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16,
         "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "crop_size": None,
         "image_processor_type": "Qwen2VLImageProcessorFast", "resample": 3},
        {"image_seq_length": 256, "size": {"height": 896, "width": 896}, "do_pan_and_scan": None},
        {"max_patches": 16, "resize_to_max_canvas": False, "size": {"height": 336, "width": 336}},
    ):  # fmt: skip
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
        check_processor(str(tmp_path))


def test_a_vision_part_alone_is_no_processor(tmp_path: Path):
    check_processor(str(tmp_path))
