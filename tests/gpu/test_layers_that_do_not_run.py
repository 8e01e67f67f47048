"""A model with experts for text and others for images, on a fake device: steps of text are decided
there, and layers that did not run in them are not counted.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.gpu.device_steps import DeviceSteps
from moe_infinity.gpu.device_table import DeviceTable
from moe_infinity.gpu.kernels import reference
from tests.cache_name import CACHE
from tests.gpu.fast_device import CACHES, let_the_host_decide, on_device
from tests.sweep import tiny
from tests.sweep.discover import architectures_in

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(2)]

PROMPT = tiny.PROMPT[:1]
TEXT = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    path: Path = tmp_path_factory.mktemp("ernie") / "model"
    tiny.tiny_model(architectures_in("ernie4_5_vl_moe")[0]).save_pretrained(path)
    return path


def look_at_an_image(moe: MoE) -> None:
    with torch.no_grad():
        moe.model(**TEXT, moe_mm_token_type_ids=torch.ones_like(PROMPT))


def write(moe: MoE, **cache: str) -> torch.Tensor:
    tokens: torch.Tensor = moe.generate(**TEXT, max_new_tokens=8, do_sample=False, **cache)
    return tokens


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("after_an_image", [False, True])
def test_text_is_decided_by_the_device_and_images_are_not_counted(
    folder, cache, after_an_image, monkeypatch
):
    """Against the reference path with the same arithmetic, so with the same routing."""
    with monkeypatch.context() as patch:
        let_the_host_decide(patch)
        with on_device(folder, "100%") as by_host:
            if after_an_image:
                look_at_an_image(by_host)
            tokens = write(by_host, **cache)
            (expected,) = by_host.request_eams()
            lookups = by_host.report().decode.lookups
    with (
        on_device(folder, "40%") as moe,
        mock.patch.object(
            DeviceSteps, "run_layer", autospec=True, side_effect=DeviceSteps.run_layer
        ) as layers,
    ):
        if after_an_image:
            look_at_an_image(moe)
        assert torch.equal(write(moe, **cache), tokens)
        (found,) = moe.request_eams()
        ran = {call.args[1] for call in layers.call_args_list}
        assert 0 < len(ran) < expected.decode.shape[0]
        assert moe.report().decode.lookups == lookups
        moe.check_invariants()
    assert (found.decode == expected.decode).all()
    assert set(found.decode.sum(axis=1).nonzero()[0].tolist()) == ran


@torch.no_grad()
def test_layers_that_get_a_part_of_a_steps_tokens_are_counted(folder):
    """A batch of which one sequence goes on with text, the other one with an image."""
    ids = tiny.PROMPT[:2]
    image = torch.zeros_like(ids)
    image[:, 2:4] = 1

    def logits(moe: MoE) -> list[torch.Tensor]:
        found = []
        for n in range(6):
            out = moe.model(input_ids=ids, moe_mm_token_type_ids=image, use_cache=True)
            found.append(out.logits)
            for kinds in ([[0], [1]], [[1], [0]], [[0], [0]]):
                out = moe.model(
                    input_ids=torch.tensor([[5 + n], [9 + n]]),
                    attention_mask=torch.ones(2, out.past_key_values.get_seq_length() + 1),
                    **{CACHE: out.past_key_values},
                    moe_mm_token_type_ids=torch.tensor(kinds),
                )
                found.append(out.logits)
        return found

    with on_device(folder, "100%") as moe:
        expected = logits(moe)
        moe.check_invariants()  # applies the rest
        all_hits = moe.report().decode
    with on_device(folder, "40%") as moe:
        assert all(map(torch.equal, logits(moe), expected))
        moe.check_invariants()
        decode = moe.report().decode
        assert decode.lookups == all_hits.lookups > 0
        assert decode.misses > all_hits.misses


def test_a_layer_that_ran_in_the_step_before_is_not_reported_again():
    table = DeviceTable(
        torch.zeros(4, 16, dtype=torch.uint8), num_layers=2, num_experts=4, max_pairs=8
    )
    ran = []
    for layers in ([0, 1], [0], []):
        for layer in layers:
            reference.resolve(table, layer, torch.tensor([[1, -1]]))
        table.end_step()
        ran.append([layer for layer in range(2) if table.read_report(layer, 2) is not None])
        table.begin_step()
    assert ran == [[0, 1], [0], []]
