"""What `run --profile` and `run --report-html` watch, and the page that comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from moe_infinity import __version__
from moe_infinity.cache.counters import Counters
from moe_infinity.model import MoE
from moe_infinity.pictures.run_page import FinishedRun, write_page
from moe_infinity.profiling import Profile, profiling
from moe_infinity.step_counts import counting_steps, decode_steps_of
from moe_infinity.streaming import TextStream


class Watched(NamedTuple):
    """What was seen of a run; complete once it has ended."""

    profile: Profile
    counters: list[Counters]  # before the first pass and after each one


@contextmanager
def watching(moe: MoE) -> Iterator[Watched]:
    """Where the time goes, and what every pass of the model counts."""
    with profiling(moe) as profile, counting_steps(moe) as counters:
        yield Watched(profile, counters)


def write_report(
    path: Path,
    moe: MoE,
    prompt: str,
    stream: TextStream,
    watched: Watched,
    settings: Mapping[str, Any],
) -> None:
    """The page about a stream that has ended. Raises OutputError."""
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
        steps=decode_steps_of(watched.counters),
        seconds=watched.profile.seconds,
    )
    write_page(run, path)
