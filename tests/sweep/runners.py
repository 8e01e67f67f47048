"""What is computed with a model, stock or offloaded: text in, logits and tokens out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cache_name import CACHE
from tests.sweep.tiny import PROMPT

Outcome = dict[str, Tensor]
MASK = torch.ones_like(PROMPT)


def run_text(model: Any, generate: Callable[..., Any]) -> Outcome:
    """Logits of the prompt, greedy tokens with the KV cache, and the logits they were chosen
    from."""
    inputs = {"input_ids": PROMPT, "attention_mask": MASK}
    decoder = {"decoder_input_ids": PROMPT[:, :5]} if model.config.is_encoder_decoder else {}
    prefill = model(**inputs, **decoder).logits
    out = generate(
        **inputs,
        max_new_tokens=4,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return {"prefill": prefill, "decode": torch.stack(out.logits), "tokens": out.sequences}


def run_ernie(model: Any, generate: Callable[..., Any]) -> Outcome:
    """Half of another prompt is said to be of an image, for the experts of images."""
    types = (torch.arange(PROMPT.shape[1]) % 2).expand_as(PROMPT)
    image = model(input_ids=PROMPT, attention_mask=MASK, moe_mm_token_type_ids=types).logits
    return {"image": image, **run_text(model, generate)}


def run_diffusion(model: Any, generate: Callable[..., Any]) -> Outcome:
    """A prompt and a canvas of tokens, which is then refined."""
    canvas = PROMPT[:, :8]
    first = model(input_ids=PROMPT, decoder_input_ids=canvas)
    second = model(
        decoder_input_ids=canvas + 1,
        **{CACHE: first.past_key_values},
        self_conditioning_logits=first.logits,
    )
    return {"first": first.logits, "second": second.logits}


def run_omni(model: Any, generate: Callable[..., Any]) -> Outcome:
    """The thinker reads and writes text; the talker is given embeddings of its own."""
    inputs = {"input_ids": PROMPT, "attention_mask": MASK}
    prefill = model.thinker(**inputs).logits
    tokens = generate(**inputs, thinker_max_new_tokens=4, return_audio=False)[0]
    talker = model.talker(
        inputs_embeds=model.talker.get_input_embeddings()(PROMPT),
        attention_mask=MASK,
        talker_input_ids=PROMPT,
    )
    return {"prefill": prefill, "tokens": tokens, "talker": talker.logits}


# Classes whose forward() or generate() takes something else than text.
RUNNERS: dict[str, Callable[..., Outcome]] = {
    "DiffusionGemmaForBlockDiffusion": run_diffusion,
    "Ernie4_5_VLMoeForConditionalGeneration": run_ernie,
    "Qwen3OmniMoeForConditionalGeneration": run_omni,
}


@torch.no_grad()
def outcome(model: Any, generate: Callable[..., Any]) -> Outcome:
    """The same computation with any loading of a model."""
    return RUNNERS.get(type(model).__name__, run_text)(model, generate)
