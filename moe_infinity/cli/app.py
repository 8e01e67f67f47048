"""The commands run, chat, inspect and pack; the app that has all commands; and how it ends.

Answers go to stdout, progress and logs to stderr. Exit codes: 0 done, 1 an error of ours, 2 wrong
usage, 130 Ctrl-C.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
from typer.core import TyperCommand

from moe_infinity.cli.models import (
    config_of,
    ensure_here,
    open_model,
    pieces_of,
    pull,
    show_preload,
)
from moe_infinity.cli.options import (
    MODEL_HELP,
    AsJson,
    Command,
    ConfigFrom,
    Dtype,
    MaxNewTokens,
    Model,
    ModelOptions,
    PromptStoreOptions,
    Seed,
    Temperature,
    TopP,
    TrustRemoteCode,
    Yes,
    checkpoint_named,
    taken,
    with_options_of,
)
from moe_infinity.cli.serve import chat_with_server, refuse_model_options, serve
from moe_infinity.cli.terminal import (
    PrintableRecord,
    byte_bar,
    prepare_streams,
    shown,
    stderr,
    talk,
    utf8_only,
    write,
)
from moe_infinity.cluster.config import ClusterOptions
from moe_infinity.errors import MoEInfinityError, OutputError
from moe_infinity.quantize.options import check_options

if TYPE_CHECKING:
    from moe_infinity.model import MoE
    from moe_infinity.prefixes.kept import KeptPrompt
    from moe_infinity.streaming import TextStream


NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EBADF)  # of stdout, where click prints help
NO_THREAD = "can't start new thread"  # what Python says where there is no memory for its stack


class RunWatcher(Protocol):
    """A dataclass whose fields are further options of `run`, and which looks at what `run` does.

    It is made before anything slow, and raises what is wrong with its options then.
    """

    def watching(
        self, moe: MoE, prompt: str, stream: TextStream, settings: Mapping[str, Any]
    ) -> AbstractContextManager[None]:
        """Enter before the stream is iterated, leave when its text is complete."""


def build_app(tools: Iterable[Command], run_watcher: type[RunWatcher]) -> typer.Typer:
    """The app with the commands of this folder and those of tools."""
    app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(options_of_all)
    ours: list[Command] = [run_watched_by(run_watcher), chat, serve, pull, inspect, pack]
    for command in (*ours, *tools):
        app.command(cls=TextCommand)(command)
    return app


class TextCommand(TyperCommand):
    """A command whose options are UTF-8, but for names of files. Raises ConfigError."""

    def invoke(self, ctx: Any) -> Any:
        for option in self.params:
            given = ctx.params.get(option.name or "")
            for text in given if isinstance(given, list) else [given]:
                if isinstance(text, str):
                    with utf8_only(option.opts[0]):
                        text.encode()
        return super().invoke(ctx)


def run_app(app: typer.Typer) -> None:
    """Run the command line. An error of ours becomes a message on stderr, without a traceback."""
    sys.unraisablehook = _press_again
    logging.setLogRecordFactory(PrintableRecord)
    try:
        prepare_streams()
        require_folder()
        app()
    except (MoEInfinityError, ImportError) as error:
        if isinstance(error, ImportError) and error.name:
            raise  # an import failed; without a name, a setting asks for a package, in words
        stderr.print(f"[bold red]error:[/bold red] {shown(error)}", soft_wrap=True)
        sys.exit(1)
    except OSError as error:
        from moe_infinity.system.machine import NotTold  # and psutil

        if not isinstance(error, NotTold) and error.errno not in NOT_WRITTEN:
            raise
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, Python flushes stdout at its end
        said = error if error.filename else error.strerror or error
        stderr.print(f"[bold red]error:[/bold red] {shown(said)}", soft_wrap=True)
        sys.exit(1)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and str(error) != NO_THREAD:
            raise
        stderr.print("[bold red]error:[/bold red] the system gives this process no more memory")
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:  # torch takes a second to exit; a second Ctrl-C then gives a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def require_folder() -> None:
    """Raises OutputError in a folder that was deleted, where torch ends the process."""
    try:
        Path.cwd()
    except FileNotFoundError as error:
        raise OutputError("the current folder was deleted: change to another one") from error


def _press_again(dropped: Any) -> None:
    """Repeat a Ctrl-C that arrived in a `__del__`, where Python ignores it.

    The packages that we import run thousands of them.
    """
    if dropped.exc_type is KeyboardInterrupt:
        from moe_infinity.system.machine import interrupt_main  # and psutil

        Timer(0.01, interrupt_main).start()
    else:
        sys.__unraisablehook__(dropped)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from moe_infinity import __version__

        write(f"moe-infinity {__version__}\n")
        raise typer.Exit


def options_of_all(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Run Mixture-of-Experts models that do not fit in memory."""


def run_watched_by(watcher: type[RunWatcher]) -> Command:
    """The command `run`, with the options of a watcher."""

    @with_options_of(watcher, PromptStoreOptions, ModelOptions, ClusterOptions)
    def run(
        model: Model,
        prompt: Annotated[
            str, typer.Option("--prompt", "-p", help="Text to continue; '-' reads stdin.")
        ],
        image: Annotated[
            list[Path] | None,
            typer.Option(
                help="A PNG, JPEG, WebP or GIF file: the prompt is then a question about it. May "
                "be given again."
            ),
        ] = None,
        max_new_tokens: MaxNewTokens = 128,
        temperature: Temperature = None,
        top_p: TopP = None,
        seed: Seed = None,
        as_json: Annotated[
            bool, typer.Option("--json", help="One JSON object instead of text.")
        ] = False,
        report: Annotated[
            bool,
            typer.Option("--report", help="Print hits, misses and loads of experts to stderr."),
        ] = False,
        yes: Yes = False,
        **options: Any,
    ) -> None:
        """Continue a prompt."""
        watching = taken(watcher, options).watching
        store = taken(PromptStoreOptions, options)
        text = _text_of(prompt)
        with open_model(model, yes=yes, **options) as moe, store.opened(moe) as prefix:
            show_preload(moe)
            settings = settings_of(max_new_tokens, temperature, top_p, seed)
            stream = _stream_of(moe, text, image or [], prefix, settings)
            with watching(moe, text, stream, settings):
                for piece in pieces_of(stream):
                    if not as_json:
                        write(piece)
            if as_json:
                write(json.dumps(_result_of(stream, moe), ensure_ascii=False) + "\n")
                return
            write("\n")
            if report:
                stderr.print(shown(moe.report()), soft_wrap=True)

    return run


def _stream_of(
    moe: MoE, text: str, images: list[Path], prefix: KeptPrompt | None, settings: dict[str, Any]
) -> TextStream:
    """The text that continues a prompt, or answers a question about images."""
    if not images:
        return moe.stream(text, prefix=prefix, **settings)
    from moe_infinity.images.question import question

    return moe.stream(question(moe, text, images), **settings)


def _text_of(prompt: str) -> str:
    """The prompt, or stdin for "-". Raises ConfigError for bytes that are no UTF-8."""
    with utf8_only("the prompt"):
        text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
        text.encode()
    return text


def _result_of(stream: TextStream, moe: MoE) -> dict[str, Any]:
    """The object that `run --json` prints."""
    return {
        "text": stream.text,
        "token_ids": stream.token_ids,
        "ttft_s": stream.ttft_s,
        "tpot_s": stream.tpot_s,
        "report": moe.report().as_dict(),
    }


@with_options_of(ModelOptions, ClusterOptions)
def chat(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help=MODEL_HELP, metavar="[MODEL]", callback=checkpoint_named),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Talk to this server instead of loading MODEL. It chooses what is not given here."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="With --url: API key of the server. Better given in the environment, which `ps` "
            "does not show.",
            envvar="MOE_INFINITY_API_KEY",
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    yes: Yes = False,
    **options: Any,
) -> None:
    """Talk to a model or a server. An empty line or Ctrl-D ends the chat, Ctrl-C an answer."""
    if (model is None) == (url is None):
        raise typer.BadParameter("give one of MODEL and --url")
    if url is not None:
        refuse_model_options(context)
        chat_with_server(url, api_key, max_new_tokens, temperature, top_p, seed)
        return
    assert model is not None
    with open_model(model, yes=yes, **options) as moe:
        show_preload(moe)
        if moe.tokenizer.chat_template is None:
            raise MoEInfinityError(f"{model} has no chat template; use `moe-infinity run`")
        settings = settings_of(max_new_tokens, temperature, top_p, seed)

        def answer(messages: list[dict[str, str]]) -> Iterator[str]:
            inputs = _inputs_of(moe, messages)
            return pieces_of(moe.stream(inputs, **settings))

        talk(answer)


def _inputs_of(moe: MoE, messages: list[dict[str, str]]) -> Any:
    """The conversation, as the model reads it. Raises MoEInfinityError: a template may fail in any
    way.
    """
    try:
        return moe.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise MoEInfinityError(f"the model's chat template fails: {said}") from error


def settings_of(
    max_new_tokens: int, temperature: float | None, top_p: float | None, seed: int | None
) -> dict[str, Any]:
    """Arguments of generate(); what is None is left to the checkpoint. Sets the random seeds if
    there is a seed.
    """
    if seed is not None:
        from transformers import set_seed

        set_seed(seed)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if temperature is not None:
        settings["do_sample"] = temperature > 0
    if temperature:
        settings["temperature"] = temperature
    if top_p is not None:
        settings["top_p"] = top_p
    return settings


def inspect(
    model: Model,
    config_from: ConfigFrom = None,
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Show layers, experts and bytes of a checkpoint, and how many experts budgets hold.

    Reads headers only.
    """
    config_of({"config_from": config_from, "dtype": dtype})
    ensure_here(model, yes=yes)
    from moe_infinity.cli.inspection import inspect_checkpoint

    summary = inspect_checkpoint(
        model, config_from=config_from, dtype=dtype, trust_remote_code=trust_remote_code
    )
    write((json.dumps(summary.as_dict()) if as_json else str(summary)) + "\n")


def pack(
    model: Model,
    experts: Annotated[str, typer.Option(help="Type to store experts in: int4, int8 or fp8.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    group_size: Annotated[
        int, typer.Option(help="For int4: how many columns share a scale, 32, 64 or 128.")
    ] = 32,
    rounding: Annotated[
        str, typer.Option(help="search (smaller error) or nearest (faster).")
    ] = "search",
    trust_remote_code: TrustRemoteCode = False,
    yes: Yes = False,
) -> None:
    """Write a checkpoint with its experts in fewer bits.

    After an interruption, the same command goes on.
    """
    check_options(experts, group_size, rounding)
    here = ensure_here(model, yes=yes)
    from moe_infinity.quantize.pack import pack_checkpoint

    with byte_bar("packing") as on_bytes:
        report = pack_checkpoint(
            here,
            output,
            experts=experts,
            group_size=group_size,
            rounding=rounding,
            trust_remote_code=trust_remote_code,
            on_bytes=on_bytes,
        )
    write(f"{report}\n")
