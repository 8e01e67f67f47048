"""GGUF files as models: the same logits as the checkpoint, experts packed as they are stored, and
a clear message for what is no model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from moe_infinity import CheckpointError, MoE
from moe_infinity.architectures.model_parts import PackedLinear
from moe_infinity.cli.inspection import inspect_checkpoint
from moe_infinity.gguf.architectures import KNOWN
from moe_infinity.gguf.fields import METADATA
from scripts.gguf_table import GUIDE, table
from tests.closeness import distance
from tests.gguf_files import build, rewrite, stock_model, widen
from tests.gguf_models import MODELS, WIDE
from tests.kernels.stored_weights import ggml_blocks
from tools.convert_to_gguf import ARCHITECTURES, convert

DEMO = Path(__file__).parent.parent / "models" / "demo"
IDS = torch.arange(3, 23)[None]
TOLERANCE = 1e-4  # of the largest logit, between two arithmetics in float32
RUN = ("-p", "Once upon a time", "--max-new-tokens", "12", "--exact", "--json")


def logits_of(file: Path, **options: Any) -> torch.Tensor:
    settings = {"dtype": "float32", "host_memory": "50%", "device": "cpu"}
    with MoE(file, **settings | options) as moe, torch.no_grad():
        found: torch.Tensor = moe.model(IDS).logits
        moe.check_invariants()
    return found


def config_for(name: str, folder: Path) -> str | None:
    """Where the config comes from, if the file does not say all of it."""
    return None if ARCHITECTURES[name] in METADATA else str(folder)


def converted(folder: Path, wanted: str) -> Path:
    file = folder / f"{wanted}.gguf"
    convert(folder, file, wanted)
    return file


@pytest.fixture(scope="module")
def demo_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, with its tokenizer inside."""
    file = tmp_path_factory.mktemp("demo") / "demo.gguf"
    convert(DEMO, file, "bf16")
    return file


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Qwen3-MoE with its GGUF files q8_0.gguf and f32.gguf."""
    folder = build("qwen3_moe", tmp_path_factory.mktemp("small"))
    for wanted in ("q8_0", "f32"):
        converted(folder, wanted)
    return folder


# numbers


@pytest.mark.sample(4)
@pytest.mark.arithmetic
@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_computes_what_its_checkpoint_does(name, tmp_path):
    folder = build(name, tmp_path / name)
    with torch.no_grad():
        expected = stock_model(folder)(IDS).logits
    found = logits_of(converted(folder, "f32"), config_from=config_for(name, folder))
    assert distance(found, expected) < TOLERANCE


@pytest.mark.arithmetic
@pytest.mark.grid
@pytest.mark.parametrize("wanted", ["q8_0", "q4_0", "q4_k_m", "mxfp4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "llama4_text", "deepseek_v2"])
def test_packed_weights_compute_what_gguf_unpacks_them_to(name, wanted, tmp_path):
    folder = build(name, tmp_path / name, **WIDE)
    file = converted(folder, wanted)
    config = config_for(name, folder)
    expected = logits_of(widen(file, tmp_path / "wide.gguf"), config_from=config)
    for exact in (True, False):
        assert distance(logits_of(file, config_from=config, exact=exact), expected) < TOLERANCE


@pytest.mark.arithmetic
def test_experts_that_gguf_cannot_write_compute_what_it_unpacks_them_to(tmp_path):
    """Random blocks: IQ2_XXS and IQ3_S beside each other, as in llama.cpp's mixes."""
    torch.manual_seed(0)
    folder = build("qwen3_moe", tmp_path / "model", **WIDE)
    experts = {}
    for tensor in gguf.GGUFReader(converted(folder, "q8_0")).tensors:
        if "_exps" in tensor.name:
            name = "iq3_s" if "down" in tensor.name else "iq2_xxs"
            columns, rows, count = map(int, tensor.shape)
            values = ggml_blocks(name, count * rows, columns).view(count, rows, -1).numpy()
            experts[tensor.name] = values, gguf.GGMLQuantizationType[name.upper()]
    file = rewrite(folder / "q8_0.gguf", tmp_path / "iq.gguf", {}, **experts)
    expected = logits_of(widen(file, tmp_path / "wide.gguf"))
    assert distance(logits_of(file), expected) < TOLERANCE
    with MoE(file, device="cpu") as moe:
        assert moe.report().experts.endswith("read by kernels")


@pytest.mark.parametrize("wanted", ["q8_0", "q4_k_m", "mxfp4"])
def test_dense_weights_have_the_bits_that_gguf_unpacks_them_to(wanted, tmp_path):
    file = converted(build("qwen3_moe", tmp_path / "model", **WIDE, vocab_size=600), wanted)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    with MoE(file, device="cpu", dtype="float32", exact=True) as moe:
        for path, name in [
            ("model.embed_tokens", "token_embd"),
            ("lm_head", "output"),
            ("model.layers.0.self_attn.v_proj", "blk.0.attn_v"),
        ]:
            tensor = stored[f"{name}.weight"]
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            found = moe.model.get_parameter(f"{path}.weight").detach().numpy()
            assert np.array_equal(found, expected)


@pytest.mark.parametrize("wanted", ["q8_0", "q4_k_m"])
def test_dense_weights_stay_packed_and_no_decode_step_unpacks_them(wanted, tmp_path, monkeypatch):
    folder = build(
        "qwen3_moe", tmp_path / "model", **WIDE, vocab_size=600, num_attention_heads=8, head_dim=32
    )
    file = converted(folder, wanted)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    with MoE(file, device="cpu", dtype="float32") as moe:
        for path, name in [
            ("lm_head", "output"),
            ("model.layers.0.self_attn.v_proj", "blk.0.attn_v"),
        ]:
            expected = stored[f"{name}.weight"].data.tobytes()
            found = moe.model.get_submodule(path).packed.memory.numpy().tobytes()
            assert found[: len(expected)] == expected
        sizes = moe.report().dense_types
        monkeypatch.setattr(PackedLinear, "weight", property(refuse))
        moe.generate(IDS, max_new_tokens=3)
    linear = (t for name, t in stored.items() if t.data.ndim == 2 and "norm" not in name)
    of_them = (t for t in linear if "attn_" in t.name or t.name == "output.weight")
    assert sum(sizes.values()) - sizes["float32"] == sum(int(t.n_bytes) for t in of_them)


def refuse(linear: PackedLinear) -> torch.Tensor:
    raise AssertionError(f"{linear} was unpacked")


def test_a_packed_layer_is_unpacked_to_the_dtype_that_the_model_is_cast_to(small):
    with MoE(small / "q8_0.gguf", device="cpu") as moe, torch.no_grad():
        linear = moe.model.model.layers[0].self_attn.q_proj
        assert linear.weight.dtype == torch.bfloat16
        exact = linear.packed.unpacked(torch.float32)
        assert torch.equal(linear.float().weight, exact)


def test_a_small_table_of_logits_and_the_embedding_is_not_packed(tmp_path):
    folder = build("qwen3_moe", tmp_path / "model", **WIDE, tie_word_embeddings=True)
    with MoE(converted(folder, "q8_0"), device="cpu") as moe:
        assert moe.model.lm_head.weight is moe.model.model.embed_tokens.weight


def test_values_that_the_converter_changed_are_put_back_before_they_are_rounded(tmp_path):
    folder = build("qwen3_next", tmp_path / "model")
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    file = converted(folder, "f32")
    with MoE(file, config_from=str(folder), dtype="bfloat16", device="cpu") as moe:
        found = dict(moe.model.named_parameters())
    wrong = [name for name, param in stock.named_parameters() if name in found
             and not torch.allclose(found[name], param, rtol=2**-8, atol=0)]  # fmt: skip
    assert wrong == []


def test_slots_have_the_bytes_of_the_file(small):
    file = small / "q8_0.gguf"
    with MoE(file, device="cpu", host_memory="100%") as moe, torch.no_grad():
        moe.model(IDS)
        report = moe.report()
    assert report.experts.startswith("gguf")
    summary = inspect_checkpoint(str(file))
    stored = [t for t in gguf.GGUFReader(file).tensors if "_exps" in t.name]
    assert report.tiers[-1].capacity_bytes == sum(int(t.n_bytes) for t in stored)
    assert summary.bytes_per_expert == summary.stored_bytes_per_expert == 3 * 96 * 64 // 32 * 34


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text"])
def test_experts_in_another_order_stay_packed(name, tmp_path):
    folder = build(name, tmp_path / name)
    summary = inspect_checkpoint(
        str(converted(folder, "mxfp4")), config_from=config_for(name, folder), dtype="bfloat16"
    )
    (types,) = summary.expert_types.values()
    assert "gate_up_proj ggml_mxfp4" in types
    assert "down_proj ggml_mxfp4" in types
    assert summary.bytes_per_expert < 0.4 * summary.unpacked_bytes_per_expert


def test_a_gguf_file_of_bfloat16_gives_the_tokens_of_its_checkpoint(demo_file):
    """The same weights in the same arithmetic: the same bits."""
    found = []
    for model in (demo_file, DEMO):
        with MoE(model, device="cpu", host_memory="50%", exact=True) as moe:
            ids = moe.tokenizer("Once upon a time", return_tensors="pt")
            found.append(moe.generate(**ids, max_new_tokens=16, do_sample=False).tolist())
    assert found[0] == found[1]


def test_experts_of_gate_and_up_in_one_tensor_are_read(small, tmp_path):
    reader = gguf.GGUFReader(small / "f32.gguf")
    writer = gguf.GGUFWriter(tmp_path / "fused.gguf", "qwen3moe")
    for key, field in reader.fields.items():
        if key.startswith("qwen3moe."):
            writer.add_key_value(key, field.contents(), field.types[0])
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    for name, data in tensors.items():
        if "ffn_gate_exps" in name:
            both = np.concatenate([data, tensors[name.replace("gate", "up")]], axis=1)
            writer.add_tensor(name.replace("gate", "gate_up"), both)
        elif "ffn_up_exps" not in name:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = logits_of(tmp_path / "fused.gguf", exact=True)
    assert distance(found, logits_of(small / "f32.gguf", exact=True)) < TOLERANCE


def test_dense_weights_have_the_dtype_that_the_user_or_the_file_says(small):
    for file, dtype, expected in [
        ("q8_0.gguf", "auto", torch.bfloat16),
        ("f32.gguf", "auto", torch.float32),
        ("f32.gguf", "bfloat16", torch.bfloat16),
    ]:
        with MoE(small / file, device="cpu", dtype=dtype) as moe:
            assert {param.dtype for param in moe.model.parameters()} == {expected}


# files


@pytest.fixture(scope="module")
def parts(small: Path) -> list[Path]:
    folder = small / "parts"
    folder.mkdir()
    convert(small, folder / "model.gguf", "q8_0", split=9)
    return sorted(folder.glob("*.gguf"))


def test_any_part_and_the_folder_stand_for_a_split_model(parts, small):
    assert len(parts) > 2
    expected = logits_of(small / "q8_0.gguf")
    for model in (parts[0], parts[-1], parts[0].parent):
        assert torch.equal(logits_of(model), expected)


def test_a_missing_part_is_named(parts, tmp_path):
    for part in parts:
        shutil.copy(part, tmp_path)
    (tmp_path / parts[1].name).unlink()
    with pytest.raises(CheckpointError, match=parts[1].name):
        MoE(tmp_path / parts[0].name)


def test_parts_in_the_wrong_places_are_refused(parts, tmp_path):
    for part, other in zip(parts, [parts[0], *parts[:0:-1]], strict=True):
        shutil.copy(part, tmp_path / other.name)
    with pytest.raises(CheckpointError, match="says that it is part"):
        MoE(tmp_path / parts[0].name)


def test_a_folder_with_several_models_is_refused_with_their_names(small, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(small / "q8_0.gguf", tmp_path / name)
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        MoE(tmp_path)


def test_the_vision_part_beside_a_model_is_left_alone(small, tmp_path):
    shutil.copy(small / "q8_0.gguf", tmp_path)
    (tmp_path / "mmproj-model.gguf").touch()
    with MoE(tmp_path, device="cpu") as moe:
        assert moe.report().experts.startswith("gguf")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        MoE(tmp_path / "model.gguf")


# commands


def test_run_takes_a_file_and_answers_as_for_its_checkpoint(demo_file, command):
    found, expected = (json.loads(command("run", model, *RUN).out) for model in (demo_file, DEMO))
    assert found.keys() == expected.keys()
    assert found["report"].keys() == expected["report"].keys()
    assert found["text"] == expected["text"]


@pytest.mark.slow
def test_chat_and_trace_take_a_file_as_its_checkpoint(demo_file, command, tmp_path):
    options = ("--host-memory", "50%", "--exact", "--max-new-tokens", "6")
    found, expected = (
        command("chat", model, *options, stdin="What is a fever?\n").out
        for model in (demo_file, DEMO)
    )
    assert found == expected != ""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once upon a time"}\n')
    routed = []
    for model in (demo_file, DEMO):
        out = tmp_path / f"{model.name}.npz"
        asked = ("trace", model, "--prompts", tmp_path / "prompts.jsonl", "-o", out, *options)
        assert command(*asked).code == 0
        routed.append(np.load(out)["experts"])
    assert np.array_equal(*routed)


def test_the_tokenizer_and_chat_template_come_from_the_file(demo_file):
    with MoE(demo_file, device="cpu") as moe:
        tokenizer = moe.tokenizer
    expected = transformers.AutoTokenizer.from_pretrained(DEMO)
    words = "Once upon a time there were 12 dogs, it's true.\n<|endoftext|> Ü"
    assert tokenizer(words).input_ids == expected(words).input_ids
    assert tokenizer.eos_token_id == expected.eos_token_id
    assert tokenizer.chat_template == expected.chat_template


def test_config_names_where_config_and_tokenizer_are(demo_file, tmp_path, command):
    """Of a file without a vocabulary."""
    shutil.copytree(DEMO, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    file = converted(tmp_path / "bare", "bf16")
    refused = command("run", file, *RUN)
    assert refused.code == 1
    assert refused.said("--config")
    found = json.loads(command("run", file, "--config", DEMO, *RUN).out)
    assert found["text"] == json.loads(command("run", DEMO, *RUN).out)["text"]


def test_inspect_lists_the_types_of_every_layer(tmp_path, command):
    folder = build("qwen3_moe", tmp_path / "model", **WIDE)
    file = converted(folder, "q4_k_m")
    types = json.loads(command("inspect", file, "--json").out)["expert_types"]
    assert types == {
        "0": "down_proj q4_k, gate_up_proj q4_k",
        "1": "down_proj q6_k, gate_up_proj q4_k",
    }
    assert "down_proj q6_k, gate_up_proj q4_k" in command("inspect", file).out


@pytest.mark.arithmetic
def test_of_a_config_with_vision_the_text_part_is_taken(tmp_path):
    folder = build("llama4_text", tmp_path / "text")
    text_config = transformers.AutoConfig.from_pretrained(folder)
    transformers.Llama4Config(text_config=text_config.to_dict()).save_pretrained(tmp_path / "all")
    file = converted(folder, "f32")
    found, expected = (logits_of(file, config_from=str(tmp_path / n)) for n in ("all", "text"))
    assert distance(found, expected) < TOLERANCE


def test_all_architectures_that_load_are_compared_here():
    assert set(KNOWN) == {ARCHITECTURES[name] for name in MODELS}


def test_the_guide_lists_the_architectures_that_load():
    assert table() in GUIDE.read_text("utf-8")
