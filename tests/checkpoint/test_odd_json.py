"""Files of a checkpoint that are no JSON, or other JSON than transformers writes: as good as that
one if they mean the same, or an error of ours that names the file.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_infinity import CheckpointError, MoE, MoEInfinityError
from moe_infinity.cli.inspection import inspect_checkpoint
from moe_infinity.prefixes.lengths import Lengths, longest_context
from moe_infinity.server.generation import Generation
from tests.conftest import make_model
from tests.safetensors_file import read, write

pytestmark = [pytest.mark.timeout(60)]
ODD = {
    "null": b"null", "list": b"[]", "number": b"3", "text": b'"x"', "empty": b"",
    "mark": b"\xef\xbb\xbf{}", "utf16": "{}".encode("utf-16"), "latin": b'{"a": "\xe9"}',
    "deep": b"[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "index"])
def test_an_odd_file_is_named(tiny_checkpoint, copy_of, file, kind):
    folder = copy_of(tiny_checkpoint)
    if file == "index":
        file = "model.safetensors.index.json"
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / file).write_bytes(ODD[kind])
    with pytest.raises(MoEInfinityError, match=file):
        MoE(folder)


def test_an_index_without_metadata_is_refused(sharded_checkpoint, copy_of):
    """transformers writes into it."""
    folder = copy_of(sharded_checkpoint)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"metadata": None}))
    with pytest.raises(CheckpointError, match="index.json: not an index of shards"):
        MoE(folder)


@pytest.mark.parametrize("value", [{"max_new_tokens": "x"}, {"suppress_tokens": 3}])
def test_a_generation_config_of_wrong_types_is_refused(tiny_checkpoint, copy_of, value):
    folder = copy_of(tiny_checkpoint)
    (folder / "generation_config.json").write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match="generation_config.json"):
        MoE(folder)


@pytest.mark.parametrize("value", [{"a": 1}, [None], "x", [[1]], True])
def test_ids_of_tokens_that_are_none_are_named(tiny_checkpoint, copy_of, value):
    folder = copy_of(tiny_checkpoint)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"generation_config.json.*eos_token_id"):
        MoE(folder)


@pytest.mark.parametrize("change", [{"top_k": "x"}, {"min_length": [1]}, {"num_beams": "2"}])
def test_numbers_that_are_none_are_named(tiny_checkpoint, copy_of, change):
    folder = copy_of(tiny_checkpoint)
    (folder / "generation_config.json").write_text(json.dumps(change))
    with pytest.raises(CheckpointError, match=f"generation_config.json.*{next(iter(change))}"):
        MoE(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "nope"}, {"head_dim": 0}, {"num_attention_heads": 0},
        {"decoder_sparse_step": 0}, {"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}},
        {"num_experts_per_tok": 0}, {"num_experts_per_tok": -1}, {"num_experts_per_tok": 1000},
    ],
)  # fmt: skip
def test_a_config_of_which_no_model_can_be_built_is_refused(tiny_checkpoint, copy_of, change):
    folder = copy_of(tiny_checkpoint)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    for open_it in (MoE, inspect_checkpoint):
        with pytest.raises(MoEInfinityError, match=r"config\.json"):
            open_it(str(folder))


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_an_odd_tokenizer_file_is_named(tiny_checkpoint, copy_of, file, kind):
    folder = copy_of(tiny_checkpoint)
    (folder / file).write_bytes(ODD[kind])
    with MoE(folder) as moe, pytest.raises(CheckpointError, match="tokenizer"):
        moe.tokenizer  # noqa: B018


@pytest.mark.parametrize(
    "change",
    [{"eos_token": 3}, {"tokenizer_class": []}, {"auto_map": 3}, {"model_max_length": "512"}],
)
def test_an_odd_value_of_a_tokenizer_is_an_error_of_ours(tiny_checkpoint, copy_of, change):
    folder = copy_of(tiny_checkpoint)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | change))
    with MoE(folder) as moe, pytest.raises(CheckpointError, match="no usable tokenizer"):
        moe.tokenizer  # noqa: B018


# as other programs write them: as good as the file of transformers


UNPACKED: list[dict[str, Any]] = [
    {}, {"quant_method": None}, {"bits": None}, {"quant_method": "none"}, {"quant_method": ""},
    {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False},
    {"load_in_4bit": False, "load_in_8bit": False},
    {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
]  # fmt: skip


@pytest.mark.parametrize("unpacked", UNPACKED, ids=str)
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_an_empty_quantization_is_none(tiny_checkpoint, copy_of, key, unpacked):
    folder = copy_of(tiny_checkpoint)
    change(folder / "config.json", **{key: unpacked})
    with MoE(folder) as moe:
        assert moe.report().experts.startswith("as stored")


def test_a_cache_of_float8_does_not_make_weights_packed(tiny_checkpoint, copy_of):
    folder = copy_of(tiny_checkpoint)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.{n}.self_attn.k_proj.k_scale": torch.ones(()) for n in range(3)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    with MoE(folder) as moe:
        assert moe.report().experts.startswith("as stored")


def test_attention_of_a_package_that_is_not_here_is_left_to_transformers(tiny_checkpoint, copy_of):
    """Config files keep what the machine had that wrote them."""
    folder = copy_of(tiny_checkpoint)
    change(folder / "config.json", _attn_implementation="flash_attention_2")
    with MoE(folder) as moe:
        assert moe.model.config._attn_implementation == "sdpa"


EMPTY: dict[str, Any] = {
    "bad_words_ids": [], "stop_strings": [], "suppress_tokens": [], "eos_token_id": [],
    "forced_eos_token_id": [], "temperature": None, "cache_implementation": None,
}  # fmt: skip


def test_empty_settings_of_generation_are_absent(tiny_checkpoint, copy_of):
    folder = copy_of(tiny_checkpoint)
    change(folder / "generation_config.json", **EMPTY)
    with MoE(folder) as moe:
        assert not any(getattr(moe.model.generation_config, name) for name in EMPTY)
        ids = moe.generate(torch.tensor([[5, 6]]), max_new_tokens=4, pad_token_id=2)
        assert ids.shape == (1, 6)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"temperature": 0.0, "do_sample": True}, {"do_sample": False}),
        ({"top_k": -1, "do_sample": True}, {"top_k": 0, "do_sample": True}),
        ({"top_k": 20.0, "do_sample": True}, {"top_k": 20, "do_sample": True}),
    ],
)
def test_settings_of_other_programs_are_those_that_they_mean(
    tiny_checkpoint, copy_of, written, meant
):
    folder = copy_of(tiny_checkpoint)
    answers = []
    for settings in (written, meant):
        change(folder / "generation_config.json", **written | settings)
        with MoE(folder, exact=True) as moe:
            torch.manual_seed(0)
            answers.append(moe.generate(torch.tensor([[5, 6]]), max_new_tokens=4, pad_token_id=2))
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"eos_token_id": 2.0}, 2), ({"eos_token_id": [2.0, 3]}, [2, 3]),
        ({"forced_eos_token_id": 3.0}, 3), ({"bad_words_ids": [[7.0]]}, [[7]]),
        ({"min_length": 4.0}, 4), ({"no_repeat_ngram_size": 2.0}, 2),
        ({"temperature": 2}, 2.0), ({"repetition_penalty": 2}, 2.0), ({"do_sample": 0}, False),
    ],
    ids=str,
)  # fmt: skip
def test_numbers_are_of_the_type_that_their_key_asks_for(tiny_checkpoint, copy_of, written, meant):
    """JSON has one kind of numbers. An end of 2.0 ended the server in a TypeError."""
    folder = copy_of(tiny_checkpoint)
    change(folder / "generation_config.json", **written)
    (name,) = written
    with MoE(folder) as moe:
        assert repr(getattr(moe.model.generation_config, name)) == repr(meant)
        Generation(moe.model)


@pytest.mark.parametrize("length", [1 << 31, 1 << 63, int(1e30)])
def test_any_number_of_positions_is_taken(tiny_checkpoint, copy_of, length):
    folder = copy_of(tiny_checkpoint)
    change(folder / "config.json", max_position_embeddings=length)
    with MoE(folder) as moe:
        assert longest_context(moe.model.config) == length
        Lengths(moe.model)


def test_any_sliding_window_is_taken(tiny_checkpoint, copy_of):
    folder = copy_of(tiny_checkpoint)
    ids = torch.tensor([[5, 6, 7]])
    found = []
    for window in (1 << 30, 1 << 60):
        change(folder / "config.json", use_sliding_window=True, sliding_window=window)
        with MoE(folder) as moe:
            found.append(moe.generate(ids, max_new_tokens=6, do_sample=False))
    assert torch.equal(*found)


def test_a_folder_may_be_named_from_the_home_folder(
    tiny_checkpoint, copy_of, tmp_path, command, monkeypatch
):
    folder = copy_of(tiny_checkpoint)
    monkeypatch.setenv("HOME", str(tmp_path))
    with MoE(f"~/{folder.name}") as moe:
        assert moe.tokenizer("w5").input_ids == [5]
    assert command("inspect", f"~/{folder.name}").code == 0


@pytest.mark.parametrize(
    ("original", "other"),
    [(32, True), (32.0, True), (1 << 31, False), (1 << 63, False), (1e30, False)],
)
def test_a_second_embedding_begins_behind_any_length(original, other):
    """LongRoPE has one for lengths up to the original and one beyond, where transformers drops the
    cache of Phi-3.5-MoE. No cache of 2^31 tokens is made to find that out.
    """
    pairs = 8
    rope = {
        "rope_type": "longrope", "factor": 4.0, "rope_theta": 1e4,
        "short_mscale": 1.1, "long_mscale": 1.3,
        "short_factor": [1.0] * pairs, "long_factor": [4.0] * pairs,
        "original_max_position_embeddings": original,
    }  # fmt: skip
    config = transformers.PhimoeConfig(
        hidden_size=4 * 2 * pairs, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=1, intermediate_size=32, num_local_experts=4, vocab_size=100,
        max_position_embeddings=4 * int(original), rope_parameters=rope,
    )  # fmt: skip
    lengths = Lengths(transformers.PhimoeForCausalLM(config).eval())
    assert lengths.is_usual(32)
    assert lengths.is_usual(33) is not other
    assert lengths.begins_anew is other


def test_an_index_may_name_its_folder(sharded_checkpoint, copy_of):
    folder = copy_of(sharded_checkpoint)
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    change(index, weight_map={key: str(folder / name) for key, name in names.items()})
    with MoE(folder) as moe:
        assert moe.report().experts
    change(index, weight_map={key: f"{folder}/../{name}" for key, name in names.items()})
    with pytest.raises(CheckpointError, match="outside of the folder"):
        MoE(folder)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("num_bytes", [1, 2, 3])
def test_weights_may_begin_at_any_byte(tmp_path, num_bytes, exact):
    """Not all programs fill the header up to a multiple of 8 bytes."""
    model = make_model().float()
    model.config.dtype = torch.float32
    model.save_pretrained(tmp_path / "whole")
    ids = torch.tensor([[5, 6, 7]])
    with MoE(tmp_path / "whole", exact=exact, device="cpu") as moe, torch.no_grad():
        expected = moe.model(ids).logits
    file = tmp_path / "whole" / "model.safetensors"
    header, data = read(file)
    write(file, json.dumps(header).encode().ljust(4096 + num_bytes), data)
    with MoE(tmp_path / "whole", exact=exact, device="cpu") as moe, torch.no_grad():
        assert torch.allclose(moe.model(ids).logits, expected, rtol=0, atol=1e-5)


def change(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
