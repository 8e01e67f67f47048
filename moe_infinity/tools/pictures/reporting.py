"""`run --profile` and `run --report-html`: what a run says of itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_infinity.cli.terminal import stderr
from moe_infinity.tools.pictures.figures import check_writable

if TYPE_CHECKING:
    from moe_infinity.cache.counters import Counters
    from moe_infinity.model import MoE
    from moe_infinity.streaming import TextStream


@dataclass(kw_only=True)
class RunReports:
    """The options, and what they make of a run. Raises OutputError."""

    profile: Annotated[
        bool,
        typer.Option("--profile", help="Print the time of each part of a decode step to stderr."),
    ] = False
    report_html: Annotated[
        Path | None,
        typer.Option(
            "--report-html",
            help="Write a page about the run: experts that were activated, hits and misses over "
            "time, where the time went.",
            dir_okay=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.report_html is not None:
            check_writable(self.report_html)

    @contextmanager
    def watching(
        self, moe: MoE, prompt: str, stream: TextStream, settings: Mapping[str, Any]
    ) -> Iterator[None]:
        """Measure the stream that is iterated inside, and report it at the end."""
        if not self.profile and self.report_html is None:
            yield
            return
        # Imported here: `--help` should not wait for torch.
        from moe_infinity import __version__
        from moe_infinity.tools.pictures.run_page import FinishedRun, write_page
        from moe_infinity.tools.profiling import counting_steps, decode_steps_of, profiling

        seen: list[Counters] = []
        with ExitStack() as measuring:
            profile = measuring.enter_context(profiling(moe))
            if self.report_html is not None:
                seen = measuring.enter_context(counting_steps(moe))
            yield
        if self.profile:
            stderr.print("\n" + str(profile), soft_wrap=True, highlight=False)
        if self.report_html is not None:
            run = FinishedRun(
                model=moe.checkpoint,
                version=__version__,
                options=asdict(moe.config) | dict(settings),
                prompt=prompt,
                text=stream.text,
                num_generated=len(stream.token_ids),
                ttft_s=stream.ttft_s,
                tpot_s=stream.tpot_s,
                report=moe.report(),
                eam=moe.request_eams()[0],
                states_LE=moe.expert_states(),
                steps=decode_steps_of(seen),
                seconds=profile.seconds,
            )
            write_page(run, self.report_html)
