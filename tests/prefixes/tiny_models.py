"""Tiny models of several kinds of caches, and how their answers are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moe_infinity import MoE
from tests.closeness import margin
from tests.conftest import save_tokenizer
from tests.sweep import tiny
from tests.sweep.discover import architectures_in

TEXT = [(7 * at * at + at) % 120 + 3 for at in range(400)]
TOLERANCE = 1e-3  # of two ways to sum in float32; 1.3e-4 was seen, another rounding included
WINDOW = 32
# Plain keys and values, sliding windows in some layers and in all, latents, and recurrent layers.
KINDS = ("qwen3_moe", "gpt_oss", "mixtral", "deepseek_v3", "qwen3_next", "lfm2_moe", "nemotron_h")
NUM_TRIED = 64  # tokens of the trial whether recurrent layers go on
RECURRENT = ("qwen3_next", "lfm2_moe", "nemotron_h")


def save_tiny(name: str, folder: Path) -> Path:
    """A tiny random model of an architecture, with a tokenizer."""
    architecture = architectures_in(name)[0]
    config = tiny.tiny_config(architecture)
    if getattr(config, "sliding_window", None) is not None:
        config.sliding_window = WINDOW
    tiny.random_model(architecture, config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def answer(moe: MoE, ids: list[int], **arguments: Any) -> Any:
    """What generate() returns for a prompt, with logits."""
    tensor = torch.tensor([ids])
    settings = {"max_new_tokens": 6, "do_sample": False, "output_logits": True} | arguments
    return moe.generate(
        input_ids=tensor,
        attention_mask=torch.ones_like(tensor),
        return_dict_in_generate=True,
        **settings,
    )


def assert_same(found: Any, expected: Any) -> None:
    """The same tokens up to the first that is near a tie, of logits that are near up to its own."""
    num_sure = next(
        (at for at, each in enumerate(expected.logits) if margin(each) <= 2 * TOLERANCE),
        len(expected.logits),
    )
    num_prompt = expected.sequences.shape[1] - len(expected.logits)
    tokens = (each.sequences[0, : num_prompt + num_sure].tolist() for each in (found, expected))
    assert next(tokens) == next(tokens)
    logits = (torch.cat(each.logits[: num_sure + 1]) for each in (found, expected))
    torch.testing.assert_close(next(logits), next(logits), atol=TOLERANCE, rtol=0)


def computed(moe: MoE) -> int:
    """Tokens of prompts that were computed so far."""
    return moe.report().prefill.tokens
