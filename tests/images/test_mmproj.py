"""GGUF models with a vision part in a file of its own, against stock transformers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import openai
import pytest
import torch
import transformers

from moe_infinity import CheckpointError, ConfigError, MoE, UnsupportedModelError
from moe_infinity.cli.inspection import inspect_checkpoint
from moe_infinity.images.mmproj import find_mmproj
from moe_infinity.images.question import question
from moe_infinity.prefixes.store_key import key_of
from moe_infinity.tools.planning.fit import sizes_of
from tests.closeness import distance
from tests.gguf_files import rewrite
from tests.images.asking import BLUE, RED, TALL, asked, said
from tests.images.files import encoded
from tests.images.mmproj_files import MODELS, Files, save_files
from tests.images.tiny_eyes import TIE, stock_answer, stock_inputs
from tests.server.serving import serving
from tools.convert_mmproj import convert

TEXT = "what do these show?"
PICTURES = (RED, TALL)
TOLERANCES = {True: 1e-5, False: 1e-4}  # of the largest logit, by `exact`
Change = Callable[[Path, Path], Any]


@pytest.fixture(scope="module", params=MODELS)
def files(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return save_files(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return save_files("qwen3_5_moe", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    found = [folder / f"{number}.png" for number in range(len(PICTURES))]
    for file, picture in zip(found, PICTURES, strict=True):
        file.write_bytes(encoded(picture, "PNG"))
    return found


def has_processor_of_gemma4() -> bool:
    """False with transformers 5.17 where there is no torchvision; 5.24 does without it."""
    try:
        return transformers.Gemma4Processor is not None
    except ModuleNotFoundError:
        return False


def opened(file: Path, **options: Any) -> MoE:
    return MoE(file, device="cpu", dtype="float32", host_memory="50%", **options)


@pytest.mark.sample(2)
@pytest.mark.arithmetic
@pytest.mark.parametrize("exact", [True, False])
def test_images_have_the_logits_of_transformers(exact, files, pictures):
    kind = transformers.AutoModelForImageTextToText
    stock = kind.from_pretrained(files.stock, dtype=torch.float32).eval()
    if stock.config.model_type == "gemma4" and not has_processor_of_gemma4():
        pytest.skip("the processor of Gemma 4 needs torchvision in this version of transformers")
    wanted = stock_inputs(files.stock, [said(*PICTURES, TEXT)], list(PICTURES))
    with torch.no_grad(), opened(files.text, exact=exact) as moe:
        assert type(moe.model) is type(stock)
        inputs = question(moe, TEXT, pictures)
        assert inputs.keys() == wanted.keys()
        assert all(torch.equal(inputs[name], wanted[name]) for name in wanted)
        found = moe.model(**inputs).logits
        assert distance(found, stock(**wanted).logits) < TOLERANCES[exact]
        text = {name: x[:, -9:] for name, x in inputs.items() if x.shape == found.shape[:2]}
        assert distance(moe.model(**text).logits, stock(**text).logits) < TOLERANCES[exact]


@pytest.mark.arithmetic
def test_the_server_answers_with_the_tokens_of_transformers(qwen):
    messages: Any = [
        asked(RED, "what?"),
        asked("th" * 5, role="assistant"),
        asked(BLUE, "and this?"),
    ]
    told = [said(RED, "what?"), said("th" * 5, role="assistant"), said(BLUE, "and this?")]
    stock = stock_answer(qwen.stock, told, [RED, BLUE])
    options = {"max_batch": 2, "prefill_chunk": 40, "prompt_store": "off"}
    with opened(qwen.text) as moe, serving(moe, **options) as server, server.client() as client:
        for _ in range(2):  # the second time from kept prefixes
            made = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=12, temperature=0, logprobs=True
            )
            text = made.choices[0].message.content
            assert text is not None
            assert text.strip() == moe.tokenizer.decode(stock.ids).strip()
            listed = made.choices[0].logprobs
            assert listed is not None
            assert [each.logprob for each in listed.content or ()] == pytest.approx(
                stock.logprobs, abs=TIE
            )


@pytest.mark.arithmetic
def test_run_answers_with_a_named_vision_part(command, qwen, pictures, tmp_path):
    file = shutil.copy(qwen.text, tmp_path)
    images = [each for picture in pictures for each in ("--image", picture)]
    options = ["--max-new-tokens", 12, "--temperature", 0, "--dtype", "float32", "--json"]
    refused = command("run", file, "-p", TEXT, *images, *options)
    assert "takes no images" in refused.err
    done = command("run", file, "--mmproj", qwen.mmproj, "-p", TEXT, *images, *options)
    stock = stock_answer(qwen.stock, [said(*PICTURES, TEXT)], list(PICTURES))
    assert json.loads(done.out)["token_ids"] == stock.ids


def test_a_vision_part_in_float16_is_widened(qwen, tmp_path, pictures):
    file = convert(qwen.stock, tmp_path / "half.gguf", "f16")
    stock = transformers.AutoModelForImageTextToText.from_pretrained(qwen.stock)
    with opened(qwen.text, mmproj=file) as moe:
        for name, weight in stock.float().model.visual.named_parameters():
            found = moe.model.model.visual.get_parameter(name)
            rounded = weight.half().float() if weight.ndim > 1 and "pos" not in name else weight
            assert torch.equal(found, rounded)


def test_inspect_counts_the_vision_part(qwen, tmp_path):
    shutil.copy(qwen.text, tmp_path)
    alone = inspect_checkpoint(str(tmp_path / qwen.text.name))
    both = inspect_checkpoint(str(qwen.text))
    tensors = gguf.GGUFReader(qwen.mmproj).tensors
    assert both.dense_bytes - alone.dense_bytes == sum(int(each.n_bytes) for each in tensors)


@pytest.mark.parametrize(
    "name",
    ["mmproj-F16.gguf", "Model.mmproj-f16.gguf", "Model-mmproj-F16.gguf", "m_MMPROJ.gguf"],
)
def test_a_vision_part_is_found_by_a_word_of_its_name(name, tmp_path):
    for file in ("Model.Q8_0.gguf", name, "mmproj.txt"):
        (tmp_path / file).touch()
    for checkpoint in (tmp_path, tmp_path / "Model.Q8_0.gguf"):
        assert find_mmproj(str(checkpoint), None) == tmp_path / name


def test_a_name_that_only_begins_with_the_word_is_no_vision_part(tmp_path):
    for file in ("Model.Q8_0.gguf", "mmprojector.gguf", "ammproj.gguf"):
        (tmp_path / file).touch()
    assert find_mmproj(str(tmp_path / "Model.Q8_0.gguf"), None) is None


def test_of_several_vision_parts_none_is_taken(qwen, tmp_path):
    for name in ("model.gguf", "mmproj-F32.gguf", "mmproj-BF16.gguf"):
        shutil.copy(qwen.text if name == "model.gguf" else qwen.mmproj, tmp_path / name)
    with opened(tmp_path / "model.gguf") as moe:
        assert moe.processor is None
    with opened(tmp_path / "model.gguf", mmproj=tmp_path / "mmproj-BF16.gguf") as moe:
        assert moe.processor is not None


def with_key(key: str, value: Any) -> Change:
    return lambda file, out: rewrite(file, out, {key: value})


def without(name: str) -> Change:
    return lambda file, out: rewrite(file, out, {}, **{name: None})


def with_tensor(name: str) -> Change:
    return lambda file, out: rewrite(file, out, {}, **{name: torch.ones(3).numpy()})


UINT32 = gguf.GGUFValueType.UINT32
REFUSED = {
    "no vision part": (with_key("general.architecture", "qwen35moe"), "no vision part of a model"),
    "another projector": (with_key("clip.projector_type", "ldp"), "of type 'ldp', expected one of"),
    "another width": (with_key("clip.vision.projection_dim", (UINT32, 32)), "width is 32, not 64"),
    "no patches": (with_key("clip.vision.patch_size", (UINT32, 0)), "patch_size is 0"),
    "a text for a size": (with_key("clip.vision.block_count", "many"), "block_count is 'many'"),
    "huge": (with_key("clip.vision.block_count", (UINT32, 1 << 31)), "block_count is 2147483648"),
    "no positions": (without("v.position_embd.weight"), "damaged, no usable tensor"),
    "cut off": (lambda file, out: out.write_bytes(file.read_bytes()[:-9000]), "ends at byte"),
    "heads of no width": (with_key("clip.vision.attention.head_count", (UINT32, 100)), "built"),
    "a missing tensor": (
        without("v.blk.1.ln1.bias"), "no tensor for model.visual.blocks.1.norm1.bias"
    ),
    "a tensor left over": (with_tensor("v.more"), "tensor v.more is no parameter"),
    "a tensor of another shape": (with_tensor("mm.2.bias"), r"shape \[3\], the model wants"),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", REFUSED)
def test_a_vision_part_that_cannot_be_used(case, qwen, tmp_path, caplog):
    """Named it is refused; found beside the model it is left aside with a warning."""
    change, said_of_it = REFUSED[case]
    file = tmp_path / "mmproj.gguf"
    change(qwen.mmproj, file)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=said_of_it):
        opened(qwen.text, mmproj=file)
    shutil.copy(qwen.text, tmp_path)
    with opened(tmp_path / qwen.text.name) as moe:
        assert moe.processor is None
        with pytest.raises(UnsupportedModelError, match=f"takes no images: .*{said_of_it}"):
            question(moe, TEXT, [])
    assert re.search(said_of_it, caplog.text)
    assert "takes no images" in caplog.text


def test_a_server_says_why_it_takes_no_images(qwen, tmp_path):
    """A vision part with a tensor too few was found beside the model."""
    shutil.copy(qwen.text, tmp_path)
    without("mm.2.bias")(qwen.mmproj, tmp_path / "mmproj.gguf")
    with opened(tmp_path / qwen.text.name) as moe, serving(moe) as server:
        client = server.client()
        given: Any = {"model": "tiny", "max_tokens": 4, "temperature": 0}
        given["messages"] = [asked("what?")]
        answer = client.chat.completions.create(**given)
        assert answer.choices[0].finish_reason
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**given | {"messages": [asked(RED, "what?")]})
    message = refused.value.body["message"]  # type: ignore[index]
    assert "reads text only" in message
    assert "mmproj.gguf: no tensor for model.visual.merger.linear_fc2.bias" in message
    assert str(tmp_path) not in message


def test_a_vision_part_of_another_model_is_refused(tmp_path, qwen):
    other = save_files("gemma4", tmp_path)
    with pytest.raises(UnsupportedModelError, match="of a gemma4 model, this one is qwen35moe"):
        opened(qwen.text, mmproj=other.mmproj)


def test_mmproj_is_for_gguf_files(qwen, tmp_path):
    with pytest.raises(ConfigError, match="mmproj is for a GGUF model"):
        opened(qwen.stock, mmproj=qwen.mmproj)
    with pytest.raises(CheckpointError, match="no such file"):
        opened(qwen.text, mmproj=tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match="mmproj must be a file name"):
        opened(qwen.text, mmproj=3)


def test_a_model_without_a_token_for_images_is_refused(qwen, tmp_path):
    tokens = gguf.GGUFReader(qwen.text).fields["tokenizer.ggml.tokens"].contents()
    changed = [token.replace("<|image_pad|>", "<|other|>") for token in tokens]
    file = rewrite(qwen.text, tmp_path / "model.gguf", {"tokenizer.ggml.tokens": changed})
    with pytest.raises(UnsupportedModelError, match=r"no token <\|image_pad\|>"):
        opened(file, mmproj=qwen.mmproj)


def test_kept_prompts_know_the_vision_part(qwen, tmp_path):
    """Of two files that differ in a weight beyond those in memory that are signed."""
    name = "v.blk.0.ffn_up.weight"
    reader = gguf.GGUFReader(qwen.mmproj)
    weight = next(tensor.data.copy() for tensor in reader.tensors if tensor.name == name)
    weight[-1, -1] += 1
    changed = rewrite(qwen.mmproj, tmp_path / "changed.gguf", {}, **{name: weight})
    keys = []
    for file in (qwen.mmproj, changed):
        with opened(qwen.text, mmproj=file) as moe:
            keys.append(key_of(moe))
    assert keys[0] != keys[1]


def test_plan_counts_the_vision_part(qwen):
    assert sizes_of(str(qwen.text)).dense_bytes == inspect_checkpoint(str(qwen.text)).dense_bytes
