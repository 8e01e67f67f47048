"""The model of a command: downloaded if need be, opened, and closed at the end; and
`moe-infinity pull`. Without torch, which `--help` should not wait for.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from moe_infinity.cli.read_ahead import reading_ahead
from moe_infinity.cli.terminal import byte_bar, count_bar, shown, stderr, write
from moe_infinity.cluster.config import ClusterConfig
from moe_infinity.config import OffloadConfig
from moe_infinity.errors import CheckpointError, ConfigError, DownloadError, MoEInfinityError
from moe_infinity.predict.history import check_place
from moe_infinity.predict.predictor import check_policy
from moe_infinity.system.garbage import no_garbage_collection

if TYPE_CHECKING:
    from moe_infinity.cli.hub import Download
    from moe_infinity.model import MoE
    from moe_infinity.streaming import TextStream


def pull(
    model: Annotated[str, typer.Argument(help="Hub id, as Qwen/Qwen3-30B-A3B.", metavar="ID")],
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Weights to take, as '*Q4_K_M*' or 'int4/*': one variant of several. May be given "
            "more than once. Default: safetensors, else PyTorch's .bin, else the only GGUF.",
            metavar="PATTERN",
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit. Default: main.")
    ] = None,
) -> None:
    """Download a model from the hub: only the files that this library reads.

    After an interruption, the same command goes on.
    """
    from moe_infinity.cli.hub import find_download

    download = find_download(model, include=include or (), revision=revision)
    here = download.bytes_here()
    stderr.print(
        f"{shown(model)}: {len(download.files)} files, {decimal(download.num_bytes)}, "
        f"of which {decimal(here)} are here, in {shown(download.cache)}",
        soft_wrap=True,
    )
    _say_what_came(download, bring(download))


def bring(download: Download) -> Path:
    """Download what is missing, with a progress bar, and return the model's folder. Raises
    DownloadError.
    """
    try:
        with byte_bar("downloading") as on_bytes:
            return download.run(on_bytes)
    except KeyboardInterrupt:
        stderr.print("stopped: the same command goes on with the files that are whole")
        raise


def _say_what_came(download: Download, folder: Path) -> None:
    """The command that runs it, or a warning that none does."""
    # Imported here: torch takes seconds, and a download does without.
    from moe_infinity.cli.inspection import inspect_checkpoint
    from moe_infinity.local import find_local, weights_in

    try:
        path = weights_in(folder, [file.name for file in download.files])
        if path is not None:
            inspect_checkpoint(path)
    except MoEInfinityError as error:
        stderr.print(f"[yellow]warning:[/yellow] {shown(error)}", soft_wrap=True)
        return
    if path is None:  # as --include wanted it
        write(f"{folder}\n")
        return
    name = download.model if find_local(download.model) == path else path
    write(f"moe-infinity run {quote(name)} -p 'Once upon a time'\n")


def ensure_here(model: str, *, yes: bool) -> str:
    """Return what can be opened of a model: its folder or GGUF file. A model of the hub that is not
    here is downloaded if `yes` or the user agrees. Raises CheckpointError, DownloadError.
    """
    from moe_infinity.local import find_local, local_folder

    found = find_local(model)
    if found is not None:
        return found
    if not yes and not (sys.stdin.isatty() and stderr.is_terminal):
        raise CheckpointError(
            f"{model}: neither a folder nor a model in the local hub cache\n"
            "hint: check the spelling of a folder; a hub id is downloaded by "
            f"`moe-infinity pull {model}`, or by --yes with this command"
        )
    from moe_infinity.cli.hub import find_download

    download = find_download(model)
    download.require_room()
    if not yes and not _agrees(download):
        raise DownloadError(f"{model}: not downloaded")
    bring(download)
    return local_folder(model)


def _agrees(download: Download) -> bool:
    missing = decimal(download.num_bytes - download.bytes_here())
    question = f"{download.model}: download {missing} into {download.cache}? [y/N] "
    try:
        return stderr.input(question, markup=False).strip().lower() in ("y", "yes")
    except EOFError:
        return False


@contextmanager
def open_model(model: str, *, yes: bool, **options: Any) -> Iterator[MoE]:
    """A checkpoint folder, GGUF file or hub id as a MoE, closed when the command ends. Shows how
    far it is loaded. `yes`: a model that is not here is downloaded without a question.

    `options` are fields of OffloadConfig. Raises what `MoE(...)` and `ensure_here` raise.
    """
    config = config_of(options)
    checkpoint = checkpoint_for(model, yes=yes, cluster=options.get("cluster"))
    with reading_ahead(checkpoint, config):
        with no_garbage_collection():
            from moe_infinity.cluster.model import ClusterMoE
            from moe_infinity.model import MoE
        model_class = ClusterMoE if isinstance(config, ClusterConfig) else MoE
        with byte_bar("loading weights") as on_bytes:
            moe = model_class(checkpoint, config, on_bytes=on_bytes)
    with moe:
        # Else Python looks through all that was imported and loaded now and then, in 0.3 s.
        gc.freeze()
        try:
            yield moe
        finally:
            gc.unfreeze()


def config_of(options: dict[str, Any]) -> OffloadConfig:
    """The config that has these options of a command. Raises ConfigError, and
    TraceError if its history could not be written, before anything slow."""
    config_class = ClusterConfig if "expert_hosts" in options else OffloadConfig
    config = config_class.from_options(None, options)
    check_policy(config)
    if config.history is not None:
        check_place(Path(config.history))
    return config


def checkpoint_for(model: str, *, yes: bool, cluster: str | None) -> str:
    """Return what to open for a model, on this machine by now. On other machines of a cluster it is
    where they have it, so there a hub id stays one. Raises what `ensure_here` raises.
    """
    here = ensure_here(model, yes=yes)
    return here if cluster is None else model


def pieces_of(stream: TextStream) -> Iterator[str]:
    """The pieces of a stream. Raises ConfigError for what fails in transformers' generation outside
    the model's passes, or in a cache that needs a GPU: for a setting that it does not take, it has
    errors of many kinds.
    """
    try:
        yield from stream
    except MoEInfinityError:
        raise
    except (AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        frames = traceback.walk_tb(error.__traceback__)
        modules = [frame.f_globals.get("__name__", "") for frame, _ in frames]
        is_of_settings = any(name.startswith("transformers.generation") for name in modules)
        is_of_pass = "torch.nn.modules.module" in modules
        needs_gpu = {"transformers.cache_utils", "torch.cuda"} <= {*modules}
        if not is_of_settings or (is_of_pass and not needs_gpu):
            raise
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(
            f"transformers cannot generate with these settings: {said}\n"
            "hint: options of this command or generation_config.json"
        ) from error


def show_preload(moe: MoE) -> None:
    """With preload="wait": wait for the experts, with a progress bar on a terminal."""
    if not moe.is_ready:
        with count_bar("loading experts") as on_experts:
            moe.preload(on_experts)
