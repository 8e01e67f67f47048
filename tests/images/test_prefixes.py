"""Prefixes know images by their content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_infinity import MoE
from tests.images.asking import BLUE, RED, Answered, asked
from tests.images.eyes import EYES
from tests.images.tiny_eyes import save_checkpoint
from tests.server.serving import serving

TEXT = " ".join(f"w{number}" for number in range(40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(EYES["qwen3_vl_moe"], tmp_path_factory.mktemp("eyes"))


@pytest.fixture(scope="module")
def moe(folder: Path) -> Iterator[MoE]:
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        yield moe


def test_the_same_image_is_not_computed_again(moe):
    with serving(moe, prefix_cache="16MiB", prompt_store="off") as server:
        first = Answered(server, [asked(RED, TEXT)])
        again = Answered(server, [asked(RED, TEXT)])
    assert first.num_cached == 0
    assert again.num_cached > first.num_prompt - 20
    assert again.ids == first.ids


def test_another_image_of_the_same_size_shares_nothing_from_its_first_token_on(moe):
    with serving(moe, prefix_cache="off") as plain:
        wanted = Answered(plain, [asked(BLUE, TEXT)])
    with serving(moe, prefix_cache="16MiB", prompt_store="off") as server:
        red = Answered(server, [asked(RED, TEXT)])
        blue = Answered(server, [asked(BLUE, TEXT)])
    assert red.ids != wanted.ids
    assert (blue.num_cached, blue.ids) == (0, wanted.ids)


def test_text_before_another_image_is_shared_and_no_part_of_the_image(moe):
    with serving(moe, prefix_cache="16MiB", prompt_store="off") as server:
        red = Answered(server, [asked(TEXT, RED, "w1")])
        blue = Answered(server, [asked(TEXT, BLUE, "w1")])
    before = moe.tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert 0 < blue.num_cached <= len(before) + 4
    assert blue.ids != red.ids


def test_a_prefix_that_ends_within_an_image_is_used_up_to_the_image(moe):
    """The second prompt has the first's blocks up to one that ends among the image's tokens."""
    with serving(moe, prefix_cache="off") as plain:
        wanted = Answered(plain, [asked(RED, "w3 w4")])
    with serving(moe, prefix_cache="16MiB", prompt_store="off") as server:
        Answered(server, [asked(RED, "w1")], max_tokens=1)
        second = Answered(server, [asked(RED, "w3 w4")])
    assert second.ids == wanted.ids


def test_the_prompt_store_knows_images_by_content_too(moe, tmp_path):
    long = f"{TEXT} " * 7
    options = {"prefix_cache": "16MiB", "prompt_store": str(tmp_path)}
    with serving(moe, **options) as server:
        first = Answered(server, [asked(RED, long)])
    with serving(moe, **options) as server:
        blue = Answered(server, [asked(BLUE, long)])
        again = Answered(server, [asked(RED, long)])
    assert blue.num_cached == 0
    assert again.num_cached > 256
    assert again.ids == first.ids
    assert blue.ids != first.ids
