"""`moe-infinity trace`: which experts every token used, in prompts and in what the model wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moe_infinity.cli.models import open_model
from moe_infinity.cli.options import MaxNewTokens, Model, ModelOptions, Yes, with_options_of
from moe_infinity.cli.terminal import count_bar, stderr
from moe_infinity.errors import TraceError
from moe_infinity.output import why_unwritable
from moe_infinity.predict.tracefile import load_trace, save_trace
from moe_infinity.tools.pictures.figures import check_picture, check_writable

if TYPE_CHECKING:
    from moe_infinity.model import MoE

OF_MODEL = (
    "device", "device_memory", "host_memory", "config_from", "dtype", "exact", "trust_remote_code",
)  # fmt: skip


@with_options_of(ModelOptions, only=OF_MODEL)
def trace(
    model: Model,
    prompts: Annotated[
        Path, typer.Option(help="JSON lines, each with a 'prompt'.", exists=True, dir_okay=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The .npz to write.")],
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw what was activated: a file .svg or .png. Needs the extra plot.",
            dir_okay=False,
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 64,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first prompts, at most this many.")
    ] = None,
    yes: Yes = False,
    **options: Any,
) -> None:
    """Record the experts that each token of prompts and outputs was routed to."""
    if plot is not None:
        check_picture(plot)
    check_writable(output)
    texts = read_prompts(prompts)[:limit]
    with open_model(model, yes=yes, **options) as moe, count_bar("tracing") as on_prompt:
        written = record_trace(
            moe, texts, output, max_new_tokens=max_new_tokens, on_prompt=on_prompt
        )
    stderr.print(
        f"{output}: {written.sequences} sequences, {written.tokens} tokens", highlight=False
    )
    if plot is not None:
        from moe_infinity.tools.pictures.figures import draw_activation

        draw_activation(load_trace(output), plot, name=Path(model).name)


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
    save_trace(output, sequences, num_experts=moe.engine.recorder.num_experts)
    return Written(len(sequences), sum(len(s.token_ids_T) for s in sequences))
