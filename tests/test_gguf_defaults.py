"""Keys that a GGUF file leaves out, or sets to a zero that means no: the config has what llama.cpp
computes then, not the default of the class in transformers. What no class computes is refused.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGUFValueType as T

from moe_infinity import CheckpointError, UnsupportedModelError
from moe_infinity.gguf.config import config_of
from moe_infinity.gguf.file import read_gguf
from tests.closeness import distance
from tests.test_gguf_families import ids_of
from tests.test_gguf_published import logits_of, made, text_config, with_keys

pytestmark = pytest.mark.arithmetic

ZERO = (T.FLOAT32, 0.0)
FULL, SLIDING = "full_attention", "sliding_attention"
SCALE = "expert_weights_scale"
WINDOW, PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"
CAP = "final_logit_softcapping"
CONFIGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("hy_v3", {SCALE: None}, {"router_scaling_factor": 1.0}),
    ("hy_v3", {SCALE: ZERO}, {"router_scaling_factor": 1.0}),
    ("kimi_linear", {SCALE: None}, {"routed_scaling_factor": 1.0}),
    ("minimax_m3_vl_text", {SCALE: None}, {"routed_scaling_factor": 1.0}),
    ("nemotron_h", {"expert_weights_norm": None}, {"norm_topk_prob": False}),
    ("gemma4_text", {CAP: ZERO}, {CAP: None}),
    ("granitemoe", {"attention.scale": None}, {"attention_multiplier": 0.25}),
    ("granitemoe", {"attention.scale": ZERO}, {"attention_multiplier": 0.25}),
    ("granitemoehybrid", {"attention.scale": None}, {"attention_multiplier": 0.25}),
    ("granitemoe", {"embedding_scale": ZERO}, {"embedding_multiplier": 1.0}),
    ("granitemoe", {"residual_scale": ZERO}, {"residual_multiplier": 1.0}),
    ("granitemoehybrid", {"logit_scale": ZERO}, {"logits_scaling": 1.0}),
    ("olmoe", {"attention.clamp_kqv": ZERO}, {"clip_qkv": None}),
    ("cohere2_moe", {"logit_scale": ZERO}, {"logit_scale": 1.0}),
    ("cohere2_moe", {"logit_scale": None}, {"logit_scale": 1.0}),
    ("mellum", {PATTERN: (T.UINT32, 2)}, {"layer_types": [SLIDING, FULL] * 2}),
    ("mellum", {PATTERN: None}, {"layer_types": [SLIDING] * 3 + [FULL]}),
    ("mellum", {WINDOW: None}, {"layer_types": [FULL] * 4}),
    ("exaone_moe", {PATTERN: (T.UINT32, 2)}, {"layer_types": [SLIDING, FULL] * 2}),
    ("gpt_oss", {PATTERN: (T.UINT32, 1)}, {"layer_types": [FULL] * 2}),
    ("gpt_oss", {PATTERN: (T.UINT32, 0)}, {"layer_types": [SLIDING] * 2}),
    ("gpt_oss", {WINDOW: (T.UINT32, 0)}, {"layer_types": [FULL] * 2}),
    ("afmoe", {WINDOW: (T.UINT32, 0)}, {"sliding_window": 1 << 30}),
]


@functools.cache
def file_of(name: str, root: Path) -> Path:
    return made(name, root / name)[1]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.mark.parametrize(("name", "keys", "fields"), CONFIGS)
def test_what_is_absent_or_zero_is_what_llama_cpp_has(name, keys, fields, root):
    config = text_config(with_keys(name, file_of(name, root))(keys))
    found = {field: getattr(config, field) for field in fields}
    if "layer_types" in fields:
        fields = {"layer_types": (fields["layer_types"] * 2)[: config.num_hidden_layers]}
    assert found == fields


def test_layers_without_a_window_still_rotate(root):
    file = file_of("afmoe", root)
    unbounded = with_keys("afmoe", file)({WINDOW: None})
    config = transformers.AutoConfig.from_pretrained(file.parent)
    assert config.sliding_window < 40
    config.sliding_window = 1000
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, config=config, dtype=torch.float32
    )
    with torch.no_grad():
        expected = stock(ids_of(40)).logits
    assert distance(logits_of(unbounded), expected) < 1e-5
    assert distance(logits_of(file), expected) > 1e-3


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("gemma4_text", {"rope.scaling.type": "linear", "rope.scaling.factor": (T.FLOAT32, 4.0)},
         "scaled by 'linear'"),
        ("gpt_oss", {"rope.freq_base_swa": (T.FLOAT32, 100.0)}, "freq_base_swa is 100.0"),
        ("afmoe", {"rope.freq_base_swa": (T.FLOAT32, 100.0)}, "freq_base_swa is 100.0"),
        ("afmoe", {PATTERN: (T.UINT32, 3)}, "sliding_window_pattern"),
        ("granitemoe", {"rope.scaling.finetuned": False}, "finetuned is False"),
        ("deepseek_v3", {"expert_gating_func": (T.UINT32, 1)}, "corrected by a bias"),
    ],
)  # fmt: skip
def test_what_no_class_computes_is_refused(name, keys, said, root):
    with pytest.raises(UnsupportedModelError, match=said):
        config_of(read_gguf(with_keys(name, file_of(name, root))(keys)))


@pytest.mark.parametrize(
    ("count", "used"), [((T.UINT32, 3), (T.UINT32, 1)), ((T.UINT32, 8), (T.UINT32, 2)),
                        ((T.UINT32, 2), (T.UINT32, 3)), ((T.UINT32, 2), None)],
)  # fmt: skip
def test_groups_that_experts_do_not_fill_are_an_error(count, used, root):
    keys = {"expert_group_count": count, "expert_group_used_count": used}
    with pytest.raises(CheckpointError, match="expert_group_count is"):
        config_of(read_gguf(with_keys("deepseek_v3", file_of("deepseek_v3", root))(keys)))


def test_layers_beyond_those_that_a_file_counts_are_an_error(root):
    """They were left out without a word, as those that predict further ahead."""
    file = with_keys("qwen3_moe", file_of("qwen3_moe", root))({"block_count": (T.UINT32, 1)})
    with pytest.raises(CheckpointError, match="block_count is 1, but 2 layers have tensors"):
        config_of(read_gguf(file))
