"""`MoE.processor`, `generate()` with images, and `moe-infinity run --image`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe_infinity import ConfigError, MoE, UnsupportedModelError
from moe_infinity.images.question import question
from moe_infinity.long_prompts import in_passes
from tests.images.asking import BLUE, RED, said
from tests.images.eyes import EYES
from tests.images.files import encoded
from tests.images.tiny_eyes import save_checkpoint, stock_answer

pytestmark = pytest.mark.arithmetic
TEXT = "w1 w2 w3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(EYES["qwen3_vl_moe"], tmp_path_factory.mktemp("eyes"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pictures")
    files = [folder / "red.png", folder / "blue.png"]
    for file, picture in zip(files, (RED, BLUE), strict=True):
        file.write_bytes(encoded(picture, "PNG"))
    return files


def test_generate_answers_a_question_about_images(folder, files):
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        inputs = question(moe, TEXT, files)
        out = moe.generate(**inputs, max_new_tokens=12, do_sample=False)
    found = out[0, inputs["input_ids"].shape[1] :].tolist()
    assert found == stock_answer(folder, [said(RED, BLUE, TEXT)], [RED, BLUE]).ids


def test_a_prompt_with_images_is_not_cut_where_memory_is_short(folder, files, monkeypatch):
    """transformers 5.17 takes wrong pieces, and 5.24 cuts images of some models only."""
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        inputs = question(moe, TEXT, files * 4)
        wanted = moe.generate(**inputs, max_new_tokens=4, do_sample=False)
        room = moe.engine.room
        monkeypatch.setattr(room, "tokens_at_once", lambda *args, **kwargs: 4)
        assert torch.equal(moe.generate(**inputs, max_new_tokens=4, do_sample=False), wanted)
        text = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        assert in_passes(moe.model, room, inputs, is_begun=False) == {}
        assert in_passes(moe.model, room, text, is_begun=False) != {}
        video = text | {"pixel_values_videos": inputs["pixel_values"]}
        assert in_passes(moe.model, room, video, is_begun=False) == {}


def test_a_saved_prefix_is_of_text_alone(folder, files, tmp_path):
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        moe.save_prefix(tmp_path / "prefix", " ".join(f"w{number}" for number in range(64)))
        prefix = moe.load_prefix(tmp_path / "prefix")
        with pytest.raises(ConfigError, match="text alone"):
            moe.generate(**question(moe, TEXT, files), prefix=prefix, max_new_tokens=4)
        inputs = moe.tokenizer("w0 w1", return_tensors="pt")
        with pytest.raises(ConfigError, match="text alone"):
            moe.generate(**inputs, pixel_values_videos=inputs["input_ids"], prefix=prefix)


def test_a_prefix_has_its_places_behind_a_prompt_with_images_too(folder, files, tmp_path):
    """transformers keeps by how many places the last prompt with images was shorter."""
    text = " ".join(f"w{number}" for number in range(64))
    settings = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        prefix = moe.save_prefix(tmp_path / "prefix", text)
        inputs = moe.tokenizer(f"{text} w1 w2 w3", return_tensors="pt")

        def logits() -> torch.Tensor:
            found = moe.generate(**inputs, prefix=prefix, return_dict_in_generate=True, **settings)
            return torch.stack(found.logits)

        expected = logits()
        moe.generate(**question(moe, TEXT, files), max_new_tokens=2, do_sample=False)
        assert moe.model.model.rope_deltas.item() != 0
        torch.testing.assert_close(logits(), expected)


def test_what_a_processor_does_not_take_is_an_error_of_ours(folder, files, monkeypatch):
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        fail = lambda *given: next(iter(()))  # noqa: E731  # as where a text has marks of images
        monkeypatch.setattr("moe_infinity.images.question.model_inputs", fail)
        with pytest.raises(ConfigError, match="processor does not take this: StopIteration"):
            question(moe, TEXT, files)


def test_a_model_without_eyes_has_no_processor(tiny_checkpoint, files):
    with MoE(tiny_checkpoint, host_memory="50%") as moe:
        assert moe.processor is None
        with pytest.raises(UnsupportedModelError, match="takes no images"):
            question(moe, TEXT, files)


def test_run_answers_a_question_about_images(command, folder, files):
    images = [each for file in files for each in ("--image", file)]
    options = ["--max-new-tokens", 12, "--temperature", 0, "--dtype", "float32", "--json"]
    done = command("run", folder, "-p", TEXT, *images, *options)
    wanted = stock_answer(folder, [said(RED, BLUE, TEXT)], [RED, BLUE]).ids
    assert json.loads(done.out)["token_ids"] == wanted


def test_run_names_the_file_that_is_no_image(command, folder, files, tmp_path):
    (tmp_path / "a.png").write_text("no image")
    for name, said_of_it in (("a.png", "this is no image"), ("b.png", "No such file")):
        done = command("run", folder, "-p", TEXT, "--image", tmp_path / name)
        assert name in done.err
        assert said_of_it in done.err
