"""Options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from moe_infinity.cache.policies import ACTIVATION_AWARE, POLICIES
from moe_infinity.errors import CheckpointError, ConfigError
from moe_infinity.sizes import parse_size
from moe_infinity.system.files import expanded

if TYPE_CHECKING:
    from moe_infinity.model import MoE
    from moe_infinity.prefixes.kept import KeptPrompt

# Where the extra demo installs what these names mean.
BUNDLED = {"demo": "moe_infinity_demo", "demo-long": "moe_infinity_demo.long"}


def above_zero(value: float | None) -> float | None:
    """The value if it is above 0: typer has no range without its lower end. Refuses NaN too."""
    if value is not None and not value > 0:
        raise typer.BadParameter(f"{value:g} is not above 0")
    return value


def checkpoint_named(model: str | None) -> str | None:
    """A model or config as it was given, or where the bundled one of this name is installed. Raises
    ConfigError if it is not, and there is no such folder either; CheckpointError for a path with
    nothing at its end.
    """
    if model and model.startswith((".", "/", "~")) and not os.path.exists(expanded(model)):
        raise CheckpointError(f"{model}: there is no such folder or file")
    if model not in BUNDLED or os.path.exists(model):
        return model and os.path.expanduser(model)
    try:
        package = find_spec(BUNDLED[model])
    except ModuleNotFoundError:  # of the package around it
        package = None
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            "the bundled model is not installed\n"
            f"hint: in a clone of the repository it is models/{model}; `make dist` builds it"
        )
    return next(iter(package.submodule_search_locations))


MODEL_HELP = "Checkpoint folder, hub id or GGUF file; demo is the bundled model."
Model = Annotated[str, typer.Argument(help=MODEL_HELP, metavar="MODEL", callback=checkpoint_named)]
ConfigFrom = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="Folder or hub id whose config and tokenizer are used instead of the model's own.",
        callback=checkpoint_named,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")]
Dtype = Annotated[
    str, typer.Option(help="Type of weights: auto (as stored), bfloat16, float16 or float32.")
]
KvDtype = Annotated[
    str,
    typer.Option(
        help="Type of keys and values: auto (as the model computes), int8 or fp8, which take about "
        "half of bfloat16's bytes. Changes results."
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run Python code of the checkpoint, and kernels that it names."
    ),
]
Yes = Annotated[
    bool, typer.Option("--yes", help="Download a model that is not here without asking.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="The most tokens to generate.")]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="0 takes the likeliest token; above 0 samples. Default: as the model's "
        "generation_config.json says, else 0.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        max=1.0,
        callback=above_zero,
        help="Sample from the likeliest tokens whose probabilities sum to this, above 0. "
        "Default: as the model's generation_config.json says, else 1.",
    ),
]
Seed = Annotated[int | None, typer.Option(min=0, max=2**32 - 1, help="Seed for sampling.")]


@dataclass(kw_only=True)
class ModelOptions:
    """Options of a model that is loaded, by the names of the fields of OffloadConfig."""

    device: Annotated[
        str,
        typer.Option(
            help="Where to compute: auto (a CUDA GPU if there is one), cpu, cuda, cuda:1 or mps."
        ),
    ] = "auto"
    device_memory: Annotated[
        str | None,
        typer.Option(
            help="GPU memory for experts: '8GiB', bytes, or '25%' of all experts. "
            "Default: 80% of what is free beside the other weights."
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            help="Memory for all of the process, such as '8GiB': weights, keys and values, "
            "activations and Python. Default: what is free, less a thirty-second of the machine's."
        ),
    ] = None
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Of it, memory for experts: '8GiB', bytes, or '25%' of all experts. "
            "Default: what the rest leaves."
        ),
    ] = None
    policy: Annotated[
        str, typer.Option(help=f"Which expert is evicted first: {', '.join(POLICIES)}.")
    ] = ACTIVATION_AWARE
    prefetch: Annotated[
        bool | None,
        typer.Option(
            "--prefetch/--no-prefetch",
            help="Load experts ahead of their layer; without either, as long as it pays.",
        ),
    ] = None
    early_router: Annotated[
        bool,
        typer.Option("--early-router", help="With --prefetch: ask the next layer's router early."),
    ] = False
    preload: Annotated[
        str,
        typer.Option(
            help="Fill free memory with experts: idle (in the background), wait (before the first "
            "token) or off."
        ),
    ] = "idle"
    stream_layers: Annotated[
        bool,
        typer.Option(
            "--stream-layers/--no-stream-layers",
            help="In a long prompt: load the next layer's experts while one layer computes.",
        ),
    ] = True
    history: Annotated[
        Path | None,
        typer.Option(
            help="File of what earlier runs learned, read at the start and written at the end.",
            dir_okay=False,
        ),
    ] = None
    config_from: ConfigFrom = None
    mmproj: Annotated[
        Path | None,
        typer.Option(
            help="File with the vision part of a GGUF model. Default: the only *mmproj*.gguf "
            "beside the model.",
            dir_okay=False,
        ),
    ] = None
    dtype: Dtype = "auto"
    expert_dtype: Annotated[
        str | None,
        typer.Option(help="Pack experts as they are loaded: int4, int8 or fp8. Changes results."),
    ] = None
    kv_dtype: KvDtype = "auto"
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Compute with the bits of transformers, more slowly."),
    ] = False
    experts_implementation: Annotated[
        str,
        typer.Option(
            "--experts-implementation",
            help="How experts compute. auto: our kernels; fast: the same, or an error where a GPU "
            "cannot use them; grouped_mm, eager: as transformers' of that name, bit for bit.",
        ),
    ] = "auto"
    gpu_engine: Annotated[
        str,
        typer.Option(
            help="Drives a GPU. graphs: CUDA graphs of decode steps; host: layer by layer; "
            "auto: graphs where the model allows it."
        ),
    ] = "auto"
    trust_remote_code: TrustRemoteCode = False


@dataclass(kw_only=True)
class PromptStoreOptions:
    """Options of a command whose prompt is kept on disk."""

    prompt_store: Annotated[
        str,
        typer.Option(
            metavar="FOLDER|off",
            help="Keep a prompt of more than 256 tokens in this folder, and begin with what it "
            "has of one.",
        ),
    ] = "off"
    prompt_store_size: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="The most disk space for it, e.g. 2GiB; 1 GiB stays free."
        ),
    ] = "10GiB"

    def __post_init__(self) -> None:
        parse_size(self.prompt_store_size, whole_bytes=0)

    @contextmanager
    def opened(self, moe: MoE) -> Iterator[KeptPrompt | None]:
        """Gives what `MoE.stream` takes as `prefix`. Raises what `kept_prompt` raises."""
        if self.prompt_store == "off":
            yield None
            return
        # Imported here: `--help` should not wait for torch.
        from moe_infinity.prefixes.kept import kept_prompt

        with kept_prompt(moe, self.prompt_store, self.prompt_store_size) as prompt:
            yield prompt


Command = Callable[..., None]
Made = TypeVar("Made")


def with_options_of(
    *sources: type, only: Container[str] | None = None
) -> Callable[[Command], Command]:
    """A decorator that gives a command the fields of dataclasses as options, after its own.

    `only`: those with these names. The command receives them as `**options`.
    """

    def with_options(command: Command) -> Command:
        own = signature(command, eval_str=True).parameters.values()
        merged = [option for option in own if option.kind is not option.VAR_KEYWORD]
        for source in sources:
            added = signature(source, eval_str=True).parameters.values()
            merged += [
                option.replace(kind=option.KEYWORD_ONLY)
                for option in added
                if only is None or option.name in only
            ]
        vars(command)["__signature__"] = Signature(merged)
        return command

    return with_options


def taken(kind: type[Made], options: dict[str, Any]) -> Made:
    """A dataclass made of the options that are its fields, which `options` loses."""
    return kind(**{name: options.pop(name) for name in signature(kind).parameters})
