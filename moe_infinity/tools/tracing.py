"""Record the routing of prompts: which experts every token used, in the prompt and in what the
model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from moe_infinity.errors import TraceError
from moe_infinity.model import MoE
from moe_infinity.output import why_unwritable
from moe_infinity.predict.tracefile import save_trace


class Written(NamedTuple):
    sequences: int
    tokens: int


def read_prompts(file: Path) -> list[str]:
    """The 'prompt' of every line of a JSON-lines file. Raises TraceError for the first bad line."""
    prompts = []
    try:
        lines = file.read_text("utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise TraceError(f"{file}: cannot be read as UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise TraceError(
                f"{file}, line {number}: expected a JSON object with a 'prompt': {error!r}"
            ) from error
        if not isinstance(prompt, str) or not prompt:
            raise TraceError(f"{file}, line {number}: expected text as 'prompt', got {prompt!r}")
        prompts.append(prompt)
    if not prompts:
        raise TraceError(f"{file}: no prompts in it")
    return prompts


def record_trace(
    moe: MoE,
    prompts: Sequence[str],
    output: Path,
    *,
    max_new_tokens: int,
    on_prompt: Callable[[int, int], None] = lambda done, total: None,
) -> Written:
    """Generate greedily from each prompt and write the routing of all tokens to `output`.
    `on_prompt` gets how many prompts are done, and of how many. Raises TraceError.
    """
    if reason := why_unwritable(output):  # said before an hour of generating
        raise TraceError(f"{output}: {reason}")
    with moe.recording() as finish:
        on_prompt(0, len(prompts))
        for num_done, prompt in enumerate(prompts, start=1):
            inputs = moe.tokenizer(prompt, return_tensors="pt")
            moe.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
            on_prompt(num_done, len(prompts))
        sequences = finish()
    save_trace(output, sequences, num_experts=moe.num_experts)
    return Written(len(sequences), sum(len(s.token_ids_T) for s in sequences))
