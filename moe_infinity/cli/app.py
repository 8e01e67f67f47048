"""The command line: plan | doctor | pull | run | chat | serve | cluster | inspect | bench | pack |
trace | simulate.

Answers go to stdout, progress and logs to stderr. Exit codes: 0 done, 1 an error of ours, 2 wrong
usage, 130 Ctrl-C.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from threading import Timer
from typing import Annotated, Any

import typer
from rich.markup import escape

from moe_infinity.cli.opening import open_model, show_preload
from moe_infinity.cli.options import (
    MODEL_HELP,
    AsJson,
    ConfigFrom,
    Dtype,
    MaxNewTokens,
    Model,
    ModelOptions,
    ReportHtml,
    Seed,
    Temperature,
    TopP,
    TrustRemoteCode,
    Yes,
    checkpoint_named,
    with_options_of,
)
from moe_infinity.cli.progress import byte_bar, count_bar
from moe_infinity.cli.pulling import ensure_here, pull
from moe_infinity.cli.serve import chat_with_server, refuse_model_options, serve
from moe_infinity.cli.terminal import stderr, talk, write
from moe_infinity.cluster.command import cluster
from moe_infinity.cluster.options import ClusterOptions
from moe_infinity.errors import MoEInfinityError
from moe_infinity.system.processes import interrupt_main
from moe_infinity.tools.bench.command import bench
from moe_infinity.tools.doctor.command import doctor
from moe_infinity.tools.pictures.figures import check_picture
from moe_infinity.tools.planning.command import plan
from moe_infinity.tools.simulator.command import (
    ReplayOptions,
    ReplicaOptions,
    SimulationOptions,
    Traces,
    simulated,
)

OF_TRACE = (
    "device", "device_memory", "host_memory", "config_from", "dtype", "exact", "trust_remote_code",
)  # fmt: skip
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def show_version(is_asked: bool) -> None:
    """Print the version and end, if that is asked for."""
    if is_asked:
        from moe_infinity import __version__

        write(f"moe-infinity {__version__}\n")
        raise typer.Exit


@app.callback()
def options_of_all(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True),
    ] = False,
) -> None:
    """Run Mixture-of-Experts models that do not fit in memory."""


@app.command()
@with_options_of(ModelOptions, ClusterOptions)
def run(
    model: Model,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="Text to continue; '-' reads stdin.")
    ],
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Print hits, misses and loads of experts to stderr.")
    ] = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", help="Print the time of each part of a decode step to stderr."),
    ] = False,
    yes: Yes = False,
    report_html: ReportHtml = None,
    **options: Any,
) -> None:
    """Continue a prompt."""
    from moe_infinity.tools.profiling import profiling
    from moe_infinity.tools.step_counts import counting_steps

    has_page = report_html is not None
    if report_html is not None:
        from moe_infinity.tools.pictures.run_page import check_page

        check_page(report_html)
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    with open_model(model, yes=yes, **options) as moe:
        show_preload(moe)
        settings = settings_of(max_new_tokens, temperature, top_p, seed)
        stream = moe.stream(text, **settings)
        with (
            profiling(moe) if profile or has_page else nullcontext() as split,
            counting_steps(moe) if has_page else nullcontext() as counters,
        ):
            for piece in stream:
                if not as_json:
                    write(piece)
        if profile:
            stderr.print("\n" + str(split), soft_wrap=True, highlight=False)
        if report_html is not None and split is not None and counters is not None:
            from moe_infinity.tools.pictures.reporting import write_report

            write_report(report_html, moe, text, stream, split, counters, settings)
        if as_json:
            write(json.dumps(result_of(stream, moe), ensure_ascii=False) + "\n")
            return
        write("\n")
        if report:
            stderr.print(escape(str(moe.report())), soft_wrap=True)


@app.command()
@with_options_of(ModelOptions, ClusterOptions)
def chat(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help=MODEL_HELP, metavar="[MODEL]", callback=checkpoint_named),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to this server instead of loading MODEL.")
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
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
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
            inputs = moe.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            return iter(moe.stream(inputs, **settings))

        talk(answer)


app.command()(serve)
app.command()(pull)
app.command()(doctor)
app.command()(plan)
app.command()(bench)
app.add_typer(cluster, name="cluster")


@app.command()
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
    from moe_infinity.inspection import inspect_checkpoint

    ensure_here(model, yes=yes)
    summary = inspect_checkpoint(
        model, config_from=config_from, dtype=dtype, trust_remote_code=trust_remote_code
    )
    write((json.dumps(summary.as_dict()) if as_json else str(summary)) + "\n")


@app.command()
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
    from moe_infinity.quantize import pack_checkpoint

    here = ensure_here(model, yes=yes)
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


@app.command()
@with_options_of(ModelOptions, only=OF_TRACE)
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
    from moe_infinity.tracing import read_prompts, record_trace

    if plot is not None:
        check_picture(plot)
    texts = read_prompts(prompts)[:limit]
    with open_model(model, yes=yes, **options) as moe, count_bar("tracing") as on_prompt:
        written = record_trace(
            moe, texts, output, max_new_tokens=max_new_tokens, on_prompt=on_prompt
        )
    stderr.print(
        f"{output}: {written.sequences} sequences, {written.tokens} tokens", highlight=False
    )
    if plot is not None:
        from moe_infinity.predict.tracefile import load_trace
        from moe_infinity.tools.pictures.activation import draw_activation

        draw_activation(load_trace(output), plot, name=Path(model).name)


@app.command()
@with_options_of(ReplayOptions, ReplicaOptions, SimulationOptions)
def simulate(traces: Traces, as_json: AsJson = False, **options: Any) -> None:
    """Replay recorded routing with other policies and capacities, on one machine or on several.
    Needs no model.
    """
    files = [path / "experts.npz" if path.is_dir() else path for path in traces]
    rows, table = simulated(files, options)
    write((json.dumps({"rows": rows}) if as_json else table) + "\n")


def settings_of(
    max_new_tokens: int, temperature: float, top_p: float, seed: int | None
) -> dict[str, Any]:
    """Arguments of generate(). Sets the random seeds if there is a seed."""
    if seed is not None:
        from transformers import set_seed

        set_seed(seed)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        settings |= {"temperature": temperature, "top_p": top_p}
    return settings


def result_of(stream: Any, moe: Any) -> dict[str, Any]:
    """What `run --json` prints."""
    return {
        "text": stream.text,
        "token_ids": stream.token_ids,
        "ttft_s": stream.ttft_s,
        "tpot_s": stream.tpot_s,
        "report": moe.report().as_dict(),
    }


def _press_again(dropped: Any) -> None:
    """Repeat a Ctrl-C that arrived in a `__del__`, where Python ignores it.

    The packages that we import run thousands of them.
    """
    if dropped.exc_type is KeyboardInterrupt:
        Timer(0.01, interrupt_main).start()
    else:
        sys.__unraisablehook__(dropped)


def main() -> None:
    """Run the command line. An error of ours becomes a message on stderr, without a traceback."""
    sys.unraisablehook = _press_again
    try:
        app()
    except MoEInfinityError as error:
        stderr.print(f"[bold red]error:[/bold red] {escape(str(error))}", soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:  # torch takes a second to exit; a second Ctrl-C then gives a traceback
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    main()
