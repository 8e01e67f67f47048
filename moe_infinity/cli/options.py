"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated

import typer

from moe_infinity.cache.policies import ACTIVATION_AWARE, POLICIES


def above_zero(value: float) -> float:
    """The value if it is above 0: typer has no range without its lower end. Refuses NaN too."""
    if not value > 0:
        raise typer.BadParameter(f"{value:g} is not above 0")
    return value


Model = Annotated[str, typer.Argument(help="Checkpoint folder or hub id.", metavar="MODEL")]
ChatModel = Annotated[
    str | None, typer.Argument(help="Checkpoint folder or hub id.", metavar="[MODEL]")
]
Url = Annotated[str | None, typer.Option(help="Talk to this server instead of loading MODEL.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
Device = Annotated[
    str,
    typer.Option(help="Where to compute: auto (a GPU if there is one), cpu, cuda or cuda:1."),
]
DeviceMemory = Annotated[
    str | None,
    typer.Option(
        help="GPU memory for experts: '8GiB', bytes, or '25%' of all experts. "
        "Default: 80% of what is free beside the other weights."
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory for experts: '8GiB', bytes, or '25%' of all experts. "
        "Default: 70% of what is free."
    ),
]
Policy = Annotated[str, typer.Option(help=f"Which expert is evicted first: {', '.join(POLICIES)}.")]
Prefetch = Annotated[
    bool | None,
    typer.Option(
        "--prefetch/--no-prefetch",
        help="Load experts ahead of their layer; without either, as long as it pays.",
    ),
]
EarlyRouter = Annotated[
    bool, typer.Option("--early-router", help="With --prefetch: ask the next layer's router early.")
]
History = Annotated[
    Path | None,
    typer.Option(
        help="File of what earlier runs learned, read at the start and written at the end.",
        dir_okay=False,
    ),
]
Dtype = Annotated[
    str, typer.Option(help="Type of weights: auto (as stored), bfloat16, float16 or float32.")
]
ExpertDtype = Annotated[
    str | None,
    typer.Option(help="Pack experts as they are loaded: int4, int8 or fp8. Changes results."),
]
Exact = Annotated[
    bool,
    typer.Option("--exact", help="Compute with the bits of transformers, more slowly."),
]
Implementation = Annotated[
    str,
    typer.Option(
        "--experts-implementation",
        help="How experts compute. auto: our kernels; fast: the same, or an error where a GPU "
        "cannot use them; grouped_mm, eager: as transformers' of that name, bit for bit.",
    ),
]
StaticCache = Annotated[
    bool,
    typer.Option(
        "--static-cache",
        help="Use a KV cache of fixed size. On a GPU a step is a CUDA graph only with this.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that is part of the checkpoint."),
]
Prompt = Annotated[str, typer.Option("--prompt", "-p", help="Text to continue; '-' reads stdin.")]
ShowReport = Annotated[
    bool, typer.Option("--report", help="Print hits, misses and loads of experts to stderr.")
]
ShowProfile = Annotated[
    bool, typer.Option("--profile", help="Print the time of each part of a decode step to stderr.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="The most tokens to generate.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="0 takes the likeliest token; above 0 samples.")
]
TopP = Annotated[
    float,
    typer.Option(
        max=1.0,
        callback=above_zero,
        help="Sample from the likeliest tokens whose probabilities sum to this, above 0.",
    ),
]
Seed = Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Seed for sampling.")]
ChatKey = Annotated[
    str | None,
    typer.Option(
        help="With --url: API key of the server. Better given in the environment, which `ps` "
        "does not show.",
        envvar="MOE_INFINITY_API_KEY",
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="Key that requests must send. Better given in the environment, which `ps` does not "
        "show.",
        envvar="MOE_INFINITY_API_KEY",
    ),
]


def _of_model(
    device: Device = "auto",
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    policy: Policy = ACTIVATION_AWARE,
    prefetch: Prefetch = None,
    early_router: EarlyRouter = False,
    history: History = None,
    dtype: Dtype = "auto",
    expert_dtype: ExpertDtype = None,
    exact: Exact = False,
    experts_implementation: Implementation = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """The options that `with_model_options` adds: fields of OffloadConfig, by their names."""


def with_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the options of a model after its own.

    The command receives them as `**options` and passes them to `MoE(...)`.
    """
    own = signature(command, eval_str=True).parameters.values()
    of_model = signature(_of_model, eval_str=True).parameters.values()
    merged = [*(option for option in own if option.kind is not option.VAR_KEYWORD), *of_model]
    vars(command)["__signature__"] = Signature(merged)
    return command
