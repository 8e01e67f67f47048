"""GGUF files as other programs write them: merged from parts, with ids of no token, with several
ends of an answer, with numbers of other types.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFValueType as T
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moe_infinity import CheckpointError, MoE, UnsupportedModelError
from tests.closeness import distance
from tests.gguf_files import build, rewrite
from tools.convert_to_gguf import convert

DEMO = Path(__file__).parent.parent / "models" / "demo"
IDS = torch.arange(3, 23)[None]
TOLERANCE = 1e-4  # of the largest logit, between two arithmetics in float32


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of Qwen3-MoE in float32, without a vocabulary."""
    folder = build("qwen3_moe", tmp_path_factory.mktemp("small"))
    convert(folder, folder / "model.gguf", "f32")
    return folder / "model.gguf"


def logits_of(file: Path, *, exact: bool = True) -> torch.Tensor:
    with MoE(file, device="cpu", dtype="float32", exact=exact) as moe, torch.no_grad():
        found: torch.Tensor = moe.model(IDS).logits
    return found


def stock_logits(folder: Path, **changes: Any) -> torch.Tensor:
    """Of the checkpoint that a file was made from, with another config."""
    config = transformers.AutoConfig.from_pretrained(folder)
    for key, value in changes.items():
        setattr(config, key, value)
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32
    )
    with torch.no_grad():
        found: torch.Tensor = stock(IDS).logits
    return found


# split and merged


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("name", ["merged.gguf", "merged-00001-of-00003.gguf"])
def test_a_merged_file_is_one_file_whatever_its_parts_said(count, name, small, tmp_path):
    keys = {
        "split.no": (T.UINT16, 0), "split.count": (T.UINT16, count),
        "split.tensors.count": (T.INT32, 9),
    }  # fmt: skip
    file = rewrite(small, tmp_path / name, keys)
    assert torch.equal(logits_of(file), logits_of(small))


def test_a_part_that_is_called_otherwise_is_refused(small, tmp_path):
    keys = {"split.no": (T.UINT16, 0), "split.count": (T.UINT16, 3)}
    file = rewrite(small, tmp_path / "part.gguf", keys)
    with pytest.raises(CheckpointError, match="part 0 of 3"):
        MoE(file)


def test_a_file_may_be_called_in_capitals(small, tmp_path):
    file = Path(shutil.copy(small, tmp_path / "MODEL.GGUF"))
    assert torch.equal(logits_of(file), logits_of(small))


# ids


@pytest.mark.parametrize("key", ["padding", "bos", "eos", "eot", "unknown"])
@pytest.mark.parametrize("value", [128, 4294967295])
def test_an_id_of_no_token_is_left_out(key, value, small, tmp_path, caplog):
    name = f"tokenizer.ggml.{key}_token_id"
    file = rewrite(small, tmp_path / "m.gguf", {name: (T.UINT32, value)})
    with caplog.at_level(logging.WARNING), MoE(file, device="cpu") as moe:
        config = moe.model.config
        named = {"padding": config.pad_token_id, "bos": config.bos_token_id}
        assert named.get(key, config.eos_token_id) is None
    assert (name in caplog.text) is (value == 128)


def test_an_answer_ends_with_any_end_of_the_file(small, tmp_path):
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with MoE(small, device="cpu", dtype="float32") as moe:
        answer = moe.generate(IDS, **settings)[0, 20:].tolist()
    end = next(token for token in answer[1:] if token != answer[0])
    for key in ("eot", "eom"):
        keys = {
            "tokenizer.ggml.eos_token_id": (T.UINT32, 127),
            f"tokenizer.ggml.{key}_token_id": (T.UINT32, end),
        }
        file = rewrite(small, tmp_path / f"{key}.gguf", keys)
        with MoE(file, device="cpu", dtype="float32") as moe:
            assert moe.model.generation_config.eos_token_id == [127, end]
            found = moe.generate(IDS, **settings)[0, 20:].tolist()
        assert found == answer[: answer.index(end) + 1]


# the tokenizer, through the class


def test_a_config_without_a_tokenizer_leaves_that_of_the_file(tmp_path, command):
    convert(DEMO, tmp_path / "demo.gguf", "bf16")
    (tmp_path / "config").mkdir()
    shutil.copy(DEMO / "config.json", tmp_path / "config")
    run = ("-p", "Once upon a time", "--max-new-tokens", "8", "--exact", "--json")
    found = json.loads(
        command("run", tmp_path / "demo.gguf", "--config", tmp_path / "config", *run).out
    )
    assert found["text"] == json.loads(command("run", DEMO, *run).out)["text"]


def test_a_tokenizer_beside_the_file_is_not_that_of_the_file(tmp_path):
    """A folder may hold files of several models."""
    convert(DEMO, tmp_path / "demo.gguf", "bf16")
    (tmp_path / "tokenizer.json").write_text("{}")
    with MoE(tmp_path / "demo.gguf", device="cpu") as moe:
        assert moe.tokenizer("Once upon").input_ids == moe.tokenizer("Once upon").input_ids
        assert moe.tokenizer.eos_token == "<|endoftext|>"


def test_the_type_of_a_number_does_not_matter(small, tmp_path):
    """As in files of other programs: 8, 16, 32 or 64 bits, signed or not."""
    reader = gguf.GGUFReader(small)
    keys = {
        key: (T.INT64 if number % 2 else T.UINT16, field.contents())
        for number, (key, field) in enumerate(reader.fields.items())
        if key.startswith("qwen3moe.") and isinstance(field.contents(), int)
    }
    keys["qwen3moe.attention.layer_norm_rms_epsilon"] = (T.FLOAT64, 1e-6)
    keys["qwen3moe.rope.freq_base"] = (T.UINT32, 5000)
    assert len(keys) > 8
    assert torch.equal(logits_of(rewrite(small, tmp_path / "m.gguf", keys)), logits_of(small))


# what the metadata say of the model


def test_an_array_of_one_value_for_all_layers_is_that_value(small, tmp_path):
    keys = {
        "qwen3moe.attention.head_count_kv": [2, 2], "qwen3moe.expert_feed_forward_length": [96, 96],
        "qwen3moe.expert_used_count": [3, 3],
    }  # fmt: skip
    assert torch.equal(logits_of(rewrite(small, tmp_path / "m.gguf", keys)), logits_of(small))
    keys["qwen3moe.expert_used_count"] = [3, 2]
    with pytest.raises(UnsupportedModelError, match="expert_used_count"):
        MoE(rewrite(small, tmp_path / "n.gguf", keys))


NEUTRAL = {
    "expert_weights_scale": (T.FLOAT32, 0.0), "expert_group_count": (T.UINT32, 1),
    "expert_group_used_count": (T.UINT32, 1), "expert_gating_func": (T.UINT32, 1),
    "expert_weights_norm": True, "leading_dense_block_count": (T.UINT32, 0),
    "attention.sliding_window": (T.UINT32, 0), "final_logit_softcapping": (T.FLOAT32, 0.0),
    "rope.scaling.type": "none", "rope.scaling.factor": (T.FLOAT32, 0.0),
    "rope.dimension_count": (T.UINT32, 16), "vocab_size": (T.UINT32, 128),
    "nextn_predict_layers": (T.UINT32, 0), "unknown.key": "of some program",
}  # fmt: skip


def test_keys_that_change_nothing_are_taken(small, tmp_path):
    keys = {f"qwen3moe.{key}": value for key, value in NEUTRAL.items()}
    keys |= {"general.file_type": (T.UINT32, 999), "general.quantization_version": (T.UINT32, 2)}
    assert torch.equal(logits_of(rewrite(small, tmp_path / "m.gguf", keys)), logits_of(small))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_weights_scale", (T.FLOAT32, 2.5)), ("expert_group_count", (T.UINT32, 4)),
        ("expert_gating_func", (T.UINT32, 2)), ("attention.sliding_window", (T.UINT32, 64)),
        ("final_logit_softcapping", (T.FLOAT32, 30.0)), ("logit_scale", (T.FLOAT32, 0.5)),
        ("leading_dense_block_count", (T.UINT32, 1)), ("rope.scaling.type", "longrope"),
        ("rope.scaling.attn_factor", (T.FLOAT32, 1.5)), ("rope.dimension_count", (T.UINT32, 8)),
    ],
)  # fmt: skip
def test_a_key_that_changes_a_model_is_refused_where_no_config_says_it(key, value, small, tmp_path):
    file = rewrite(small, tmp_path / "m.gguf", {f"qwen3moe.{key}": value})
    with pytest.raises(UnsupportedModelError, match="--config"):
        MoE(file)


@pytest.mark.parametrize(
    "key", ["attention.head_count", "attention.layer_norm_rms_epsilon", "expert_used_count"]
)
def test_a_key_without_which_nothing_is_certain_is_named(key, small, tmp_path):
    with pytest.raises(CheckpointError, match=key):
        MoE(rewrite(small, tmp_path / "m.gguf", {f"qwen3moe.{key}": None}))


@pytest.mark.arithmetic
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_what_is_not_said_is_as_in_llama_cpp(name, tmp_path):
    """As many key heads as heads, which share the width of the model, and a base of 10,000."""
    folder = build(name, tmp_path / name, num_key_value_heads=4, rope_theta=10000.0)
    convert(folder, folder / "model.gguf", "f32")
    architecture = "llama" if name == "mixtral" else "qwen3moe"
    absent = ("attention.head_count_kv", "attention.key_length", "rope.freq_base", "vocab_size")
    keys = dict.fromkeys((f"{architecture}.{key}" for key in absent), None)
    file = rewrite(folder / "model.gguf", tmp_path / "m.gguf", keys)
    assert distance(logits_of(file), stock_logits(folder)) < TOLERANCE


def test_layers_without_tensors_are_missed(small, tmp_path):
    file = rewrite(small, tmp_path / "m.gguf", {"qwen3moe.block_count": (T.UINT32, 3)})
    with pytest.raises(CheckpointError, match="2 of 3 layers"):
        MoE(file)


def test_layers_that_predict_further_ahead_are_left_out(small, tmp_path):
    keys = {"qwen3moe.nextn_predict_layers": (T.UINT32, 1)}
    with MoE(rewrite(small, tmp_path / "m.gguf", keys), device="cpu") as moe:
        assert moe.model.config.num_hidden_layers == 1


# positions


def rope_of(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 5000.0, **more}


@pytest.mark.arithmetic
@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"type": "linear", "factor": (T.FLOAT32, 4.0)}, rope_of("linear", factor=4.0)),
        ({"factor": (T.FLOAT32, 4.0)}, rope_of("linear", factor=4.0)),
        ({"type": "none", "factor": (T.FLOAT32, 4.0)}, rope_of("default")),
        (
            {"type": "yarn", "factor": (T.FLOAT32, 4.0), "original_context_length": (T.UINT32, 64)},
            rope_of("yarn", factor=4.0, original_max_position_embeddings=64),
        ),
        (
            {"type": "yarn", "factor": (T.FLOAT32, 4.0), "yarn_beta_fast": (T.FLOAT32, 8.0),
             "yarn_attn_factor": (T.FLOAT32, 1.5)},
            rope_of("yarn", factor=4.0, original_max_position_embeddings=256, beta_fast=8.0,
                    attention_factor=1.5),
        ),
    ],
)  # fmt: skip
def test_scaled_positions_are_those_of_transformers(keys, rope, small, tmp_path):
    scaling = {f"qwen3moe.rope.scaling.{key}": value for key, value in keys.items()}
    file = rewrite(small, tmp_path / "m.gguf", scaling)
    assert distance(logits_of(file), stock_logits(small.parent, rope_parameters=rope)) < TOLERANCE


def test_the_older_key_of_a_factor_is_read(small, tmp_path):
    keys = {"qwen3moe.rope.scale_linear": (T.FLOAT32, 4.0)}
    with MoE(rewrite(small, tmp_path / "m.gguf", keys), device="cpu") as moe:
        assert moe.model.config.rope_parameters == rope_of("linear", factor=4.0)


LLAMA3 = rope_of(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)  # fmt: skip


def llama3_factors(rope: dict[str, Any] = LLAMA3) -> np.ndarray:
    """What llama.cpp's converter writes as rope_freqs.weight, of a head of 16."""
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=16384
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / 5000.0 ** (torch.arange(0, 16, 2) / 16)
    return (plain / scaled).float().numpy()


@pytest.mark.arithmetic
def test_factors_of_llama_3_are_known_as_such(small, tmp_path):
    factors = llama3_factors()
    assert 1 == factors[0] < factors[-2] < factors[-1] == 8
    file = rewrite(small, tmp_path / "m.gguf", {}, **{"rope_freqs.weight": factors})
    with MoE(file, device="cpu") as moe:
        assert moe.model.config.rope_parameters == LLAMA3
    expected = stock_logits(small.parent, rope_parameters=LLAMA3)
    assert distance(logits_of(file), expected) < TOLERANCE


@pytest.mark.arithmetic
def test_factors_of_llama_4_have_none_between(small, tmp_path):
    rope = rope_of("llama3", factor=16.0, low_freq_factor=1.0, high_freq_factor=1.0,
                   original_max_position_embeddings=1024)  # fmt: skip
    factors = llama3_factors(rope)
    assert {*factors.tolist()} == {1.0, 16.0}
    file = rewrite(small, tmp_path / "m.gguf", {}, **{"rope_freqs.weight": factors})
    assert distance(logits_of(file), stock_logits(small.parent, rope_parameters=rope)) < TOLERANCE


def test_factors_of_one_change_nothing_and_others_need_a_config(small, tmp_path):
    ones = {"rope_freqs.weight": np.ones(8, np.float32)}
    assert torch.equal(logits_of(rewrite(small, tmp_path / "1.gguf", {}, **ones)), logits_of(small))
    for number, factors in enumerate((llama3_factors()[::-1], np.zeros(8), np.arange(1, 9))):
        other = {"rope_freqs.weight": np.ascontiguousarray(factors, np.float32)}
        file = rewrite(small, tmp_path / f"other{number}.gguf", {}, **other)
        with pytest.raises(UnsupportedModelError, match=r"rope_freqs(.|\n)*--config"):
            MoE(file)


# tensors of other forms


@pytest.mark.arithmetic
@pytest.mark.parametrize("wanted", ["f32", "q8_0"])
def test_experts_may_have_tensors_of_their_own(wanted, tmp_path):
    """As those of Mixtral before llama.cpp stacked them. Of 12, the last follow the second."""
    folder = build("mixtral", tmp_path / "model", num_local_experts=12)
    convert(folder, folder / "model.gguf", wanted)
    file = one_by_one(folder / "model.gguf", tmp_path / "m.gguf")
    assert torch.equal(logits_of(file), logits_of(folder / "model.gguf"))
    for exact in (True, False):
        with MoE(file, device="cpu", host_memory="50%", exact=exact) as moe:
            assert moe.report().experts.startswith("gguf")
            assert moe.generate(IDS, max_new_tokens=3).shape[1] == 23


@pytest.mark.parametrize("wanted", ["f32", "q8_0"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_queries_keys_and_values_may_be_one_tensor(name, wanted, tmp_path):
    """As llama.cpp's converter writes them with --fuse-qkv; those of Qwen2-MoE have biases."""
    folder = build(name, tmp_path / "model")
    convert(folder, folder / "model.gguf", wanted)
    stored = {tensor.name: tensor.data for tensor in gguf.GGUFReader(folder / "model.gguf").tensors}
    for exact in (True, False):
        expected = logits_of(folder / "model.gguf", exact=exact)
        file = fused(folder / "model.gguf", tmp_path / f"{exact}.gguf")
        assert torch.equal(logits_of(file, exact=exact), expected)
    assert ("blk.0.attn_q.bias" in stored) is (name == "qwen2_moe")


def test_one_tensor_of_another_size_is_named(small, tmp_path):
    leaves = [f"blk.0.attn_{leaf}.weight" for leaf in "qkv"]
    wrong = {"blk.0.attn_qkv.weight": np.zeros((65, 64), np.float32)}
    with pytest.raises(CheckpointError, match="attn_qkv"):
        MoE(rewrite(small, tmp_path / "m.gguf", {}, **dict.fromkeys(leaves, None), **wrong))


def fused(file: Path, out: Path) -> Path:
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    changed: dict[str, Any] = {}
    for name in stored:
        parts = [name.replace("attn_q.", f"attn_{leaf}.") for leaf in "qkv"]
        if parts[0] != parts[1]:
            both = np.concatenate([stored[part].data for part in parts])
            changed |= dict.fromkeys(parts)
            changed[name.replace("attn_q.", "attn_qkv.")] = both, stored[name].tensor_type
    return rewrite(file, out, {}, **changed)


def one_by_one(file: Path, out: Path) -> Path:
    changed: dict[str, Any] = {}
    for tensor in gguf.GGUFReader(file).tensors:
        if "_exps." in tensor.name:
            changed[tensor.name] = None
            for number, data in enumerate(tensor.data):
                name = tensor.name.replace("_exps.", f".{number}.")
                changed[name] = data, tensor.tensor_type
    return rewrite(file, out, {}, **changed)
