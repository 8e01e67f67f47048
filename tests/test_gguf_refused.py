"""GGUF files that are no model, or not enough of one, are refused with what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_infinity import CheckpointError, MoE, UnsupportedModelError
from moe_infinity.cli.inspection import inspect_checkpoint
from moe_infinity.gguf.config import config_of
from moe_infinity.gguf.file import read_gguf
from tests.gguf_files import Tensor, build, header, number, rewrite, text
from tools.convert_to_gguf import convert


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Qwen3-MoE with its GGUF file q8_0.gguf."""
    folder = build("qwen3_moe", tmp_path_factory.mktemp("small"))
    convert(folder, folder / "q8_0.gguf", "q8_0")
    return folder


def test_an_architecture_whose_metadata_are_not_enough_asks_for_a_config(tmp_path):
    folder = build("phimoe", tmp_path / "model")
    convert(folder, tmp_path / "model.gguf", "f32")
    with pytest.raises(UnsupportedModelError, match="--config"):
        MoE(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.type": text("adapter")}, "LoRA adapter"),
        ({"general.type": text("imatrix")}, "importance matrix"),
        ({"general.type": text("mmproj")}, "vision part"),
        ({"general.architecture": text("clip")}, "vision part"),
        ({"general.architecture": text("llama")}, "no routed experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_moe_model_is_refused_as_what_it_is(metadata, said, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(header(metadata, [Tensor("token_embd.weight")]) + bytes(4096))
    for load in (MoE, lambda path: inspect_checkpoint(str(path))):
        with pytest.raises(UnsupportedModelError, match=said):
            load(file)


def test_metadata_without_an_architecture_are_refused(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(header({"a": number(1)}, [Tensor("t")]) + bytes(4096))
    with pytest.raises(CheckpointError, match=r"general\.architecture"):
        MoE(file)


def rename(file: Path, out: Path, old: str, new: str) -> Path:
    """A copy in which a tensor has another name of the same length."""
    content = file.read_bytes()
    assert len(old) == len(new)
    out.write_bytes(content.replace(old.encode(), new.encode()))
    return out


@pytest.mark.parametrize(
    "name", ["blk.1.ffn_up_exps.weight", "blk.0.attn_q.weight", "output_norm.weight"]
)
def test_a_tensor_that_is_missing_or_unknown_is_named(name, small, tmp_path):
    file = rename(small / "q8_0.gguf", tmp_path / "m.gguf", name, name[:-6] + "wrongs")
    with pytest.raises(CheckpointError) as caught:
        MoE(file)
    assert name.split(".")[-2] in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("rope.freq_base", float("nan"), "rope_theta has nan"),
        ("attention.layer_norm_rms_epsilon", 1e30, "rms_norm_eps has 1e.30"),
        ("block_count", 1 << 40, "block_count is"),
        ("expert_count", 1 << 40, "expert_count is"),
        ("rope.scaling.factor", 1e20, "factor has 1e.20"),
    ],
)
def test_metadata_that_no_model_has_are_named(key, value, said, small):
    gguf = read_gguf(small / "q8_0.gguf")
    gguf.metadata[f"{gguf.architecture}.{key}"] = value
    with pytest.raises(CheckpointError, match=rf"q8_0\.gguf: .*{said}"):
        config_of(gguf)


def test_a_tensor_of_another_shape_than_the_config_says_is_named(small, tmp_path):
    folder = build("qwen3_moe", tmp_path / "other", num_key_value_heads=4)
    with pytest.raises(CheckpointError, match="k_proj"):
        MoE(small / "q8_0.gguf", config_from=str(folder))


def test_an_architecture_that_nobody_has_checked_needs_a_config(tmp_path, small):
    file = rename(small / "q8_0.gguf", tmp_path / "m.gguf", "qwen3moe", "dots.one")
    with pytest.raises(UnsupportedModelError, match="--config"):
        MoE(file)


def test_an_architecture_that_nobody_has_checked_is_tried_with_a_warning(tmp_path, small, caplog):
    """The gguf package knows neither the name nor which tensors there are."""
    file = rename(small / "q8_0.gguf", tmp_path / "m.gguf", "qwen3moe", "dots.one")
    ids = torch.arange(3, 23)[None]
    settings = {"dtype": "float32", "device": "cpu", "config_from": str(small)}
    with MoE(small / "q8_0.gguf", **settings) as moe, torch.no_grad():
        expected = moe.model(ids).logits
    assert "nobody has compared" not in caplog.text
    with MoE(file, **settings) as moe, torch.no_grad():
        assert torch.equal(moe.model(ids).logits, expected)
    assert caplog.text.count("dots.one is tried, but nobody has compared it") == 1


@pytest.mark.parametrize("name", ["blk.1.attn_k_norm.weight", "blk.1.ffn_up_exps.weight"])
def test_an_architecture_that_nobody_has_checked_has_the_tensors_of_its_class(
    name, tmp_path, small
):
    file = rename(small / "q8_0.gguf", tmp_path / "a.gguf", "qwen3moe", "dots.one")
    file = rename(file, tmp_path / "b.gguf", name, name[:-6] + "wrongs")
    with pytest.raises(CheckpointError, match=name.split(".")[2]):
        MoE(file, config_from=str(small))


def test_positions_scaled_by_a_tensor_need_a_config(small, tmp_path):
    file = rename(
        small / "q8_0.gguf", tmp_path / "m.gguf", "output_norm.weight", "rope_freqs_.weight"
    )
    with pytest.raises(UnsupportedModelError, match="--config"):
        MoE(file)


def test_a_table_of_n_grams_that_cannot_be_is_refused_before_its_primes_are_looked_for(tmp_path):
    folder = build("qwen4_exp_text", tmp_path / "model")
    convert(folder, folder / "f32.gguf", "f32")
    for key, value in (("head_vocab_sizes", [1 << 30] * 4), ("layers", [-1]), ("layers", [1.5])):
        file = rewrite(folder / "f32.gguf", tmp_path / "m.gguf", {f"qwen4exp.ple.{key}": value})
        with pytest.raises(CheckpointError, match="sizes of the table of n-grams"):
            MoE(file)
