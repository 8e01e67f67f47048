"""A file that changes under a pass inside which other passes run: each of them sees it."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from moe_infinity import MoE
from moe_infinity.errors import CheckpointError
from moe_infinity.experts import Phase, Step
from tests.test_mapped import IDS, can_map, small_models_are_mapped

__all__ = ["can_map", "small_models_are_mapped"]

PROMPT = Step(Phase.PREFILL, 1, IDS.shape[1], begins_B=np.ones(1, dtype=bool))


@pytest.mark.usefixtures("can_map")
def test_a_change_is_an_error_even_if_a_pass_inside_has_the_file_right_again(
    tiny_checkpoint, copy_of
):
    file = copy_of(tiny_checkpoint) / "model.safetensors"
    with MoE(file.parent) as moe, torch.no_grad():
        found = moe.model(IDS).logits

        def pass_with_another_inside() -> None:
            with moe.engine.unchanged_files():
                os.utime(file, (1, 1))
                with moe.engine.unchanged_files():
                    pass  # begins with a file that is what it was

        with pytest.raises(CheckpointError, match="was changed, or its disk failed"):
            pass_with_another_inside()
        assert torch.equal(found, moe.model(IDS).logits)
        moe.check_invariants()


@pytest.mark.usefixtures("can_map")
def test_a_change_that_a_pass_began_with_is_none_of_its_own(tiny_checkpoint, copy_of):
    file = copy_of(tiny_checkpoint) / "model.safetensors"
    with MoE(file.parent) as moe, torch.no_grad():
        found = moe.model(IDS).logits
        for second in range(3):
            os.utime(file, (second, second))
            assert torch.equal(found, moe.model(IDS).logits)
            with moe.engine.unchanged_files(), moe.engine.unchanged_files():
                pass


@pytest.mark.usefixtures("can_map")
def test_a_request_between_two_layers_of_a_prompt_hides_no_change_from_it(tiny_checkpoint, copy_of):
    """The request is answered from the right file, the prompt was begun with the other."""
    file = copy_of(tiny_checkpoint) / "model.safetensors"
    with MoE(file.parent, preload="off") as moe:
        found = moe.forward(PROMPT, input_ids=IDS).logits
        inside: list[torch.Tensor] = []

        def others() -> None:
            if not inside:
                os.utime(file, (1, 1))
                inside.append(moe.forward(PROMPT, input_ids=IDS).logits)

        with pytest.raises(CheckpointError, match="was changed, or its disk failed"):
            moe.forward(PROMPT, others=others, input_ids=IDS)
        assert torch.equal(inside[0], found)
        assert torch.equal(moe.forward(PROMPT, input_ids=IDS).logits, found)
        moe.check_invariants()
