"""The page that `run --report-html` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moe_infinity import __version__
from moe_infinity.cache.counters import Counters
from moe_infinity.model import MoE
from moe_infinity.streaming import TextStream
from moe_infinity.tools.pictures.run_page import FinishedRun, write_page
from moe_infinity.tools.profiling import Profile
from moe_infinity.tools.step_counts import decode_steps_of


def write_report(
    path: Path,
    moe: MoE,
    prompt: str,
    stream: TextStream,
    profile: Profile,
    counters: Sequence[Counters],
    settings: Mapping[str, Any],
) -> None:
    """The page about a stream that has ended. `counters` are those before the first pass and after
    each one. Raises OutputError.
    """
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
        steps=decode_steps_of(counters),
        seconds=profile.seconds,
    )
    write_page(run, path)
