"""The page about a run: whole, on its own, true, and harmless whatever the model is called."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_infinity import MoE
from moe_infinity.cache.counters import Counters, PhaseCounters, PrefetchCounters
from moe_infinity.errors import OutputError
from moe_infinity.memory.needs import KvBytes
from moe_infinity.predict.eamc import RequestEam
from moe_infinity.report import Report, TierOccupancy
from moe_infinity.tools.pictures import run_page
from moe_infinity.tools.pictures.reporting import RunReports
from moe_infinity.tools.pictures.run_page import (
    LEVELS,
    FinishedRun,
    levels_of,
    page_of,
    path_of,
    state_paths,
    write_page,
)
from moe_infinity.tools.profiling import counting_steps, decode_steps_of

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}"
VOID = {"meta", "rect", "path"}


class Page(HTMLParser):
    """Tags, their attributes and texts. Asserts that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def a_run(**changes: Any) -> FinishedRun:
    report = Report(
        policy="lru", experts="as stored, fast", prefill=PhaseCounters(misses=3, steps=1, tokens=2),
        decode=PhaseCounters(hits=6, late_hits=1, misses=1, steps=2, tokens=2),
        startup_bytes_read=1, dense_types={}, row_types={}, kv=KvBytes(1024, 0, 0),
        prefetches=PrefetchCounters(),
        preload=Counters().preload, evictions=0, tiers=(TierOccupancy("host", 3, 4, 2048),),
        paths=(),
    )  # fmt: skip
    run = FinishedRun(
        model="some/model", version="1.2.3", options={"host_memory": "25%"}, prompt="Once",
        text=" upon a time", num_generated=3, ttft_s=0.5, tpot_s=0.25, report=report,
        eam=RequestEam(np.array([[4, 0], [3, 1]]), np.array([[2, 0], [0, 2]])),
        states_LE=np.array([[3, 0], [1, -1]], dtype=np.int8),
        steps=[PhaseCounters(hits=3, misses=1), PhaseCounters(hits=3, late_hits=1, stall_s=0.5)],
        seconds={"experts": 0.3, "attention": 0.1},
    )  # fmt: skip
    return replace(run, **changes)


def test_the_page_is_whole_and_asks_for_nothing_from_anywhere():
    text = page_of(a_run())
    page = Page(text)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)
    for tag, attributes in page.tags:
        assert not {"src", "href", "srcset", "action", "xlink:href"} & attributes.keys(), tag
    (policy,) = [each for each in page.all("meta") if "http-equiv" in each]
    assert (policy["content"] or "").startswith("default-src 'none'")


def test_what_comes_from_outside_is_text():
    hostile = {"model": HOSTILE, "prompt": HOSTILE, "text": HOSTILE, "options": {HOSTILE: HOSTILE}}
    page = Page(page_of(a_run(**hostile)))
    assert (len(page.all("script")), len(page.all("img"))) == (2, 0)
    assert sum(HOSTILE in text for text in page.texts) >= 5  # the title and the heading, too


def test_no_text_of_a_report_is_markup():
    """Names of formats, dtypes and paths come from a checkpoint, too."""
    report = a_run().report
    tiers = tuple(replace(tier, tier=HOSTILE) for tier in report.tiers)
    report = replace(report, policy=HOSTILE, experts=HOSTILE, tiers=tiers)
    page = Page(page_of(a_run(report=report, version=HOSTILE, seconds={HOSTILE: 0.1})))
    assert (len(page.all("script")), len(page.all("img"))) == (2, 0)
    assert sum(HOSTILE in text for text in page.texts) >= 4


def test_text_that_is_no_unicode_is_written(tmp_path):
    write_page(a_run(text="half a character: \ud83d"), tmp_path / "out.html")
    assert "half a character: ?" in (tmp_path / "out.html").read_text("utf-8")


def test_every_drawing_has_a_title_and_a_description():
    page = Page(page_of(a_run()))
    ids = {attributes.get("id") for _, attributes in page.tags}
    drawings = page.all("svg")
    assert len(drawings) == 4  # prompt, decoding, tiers, steps
    for drawing in drawings:
        assert drawing["role"] == "img"
        assert set((drawing["aria-labelledby"] or "").split()) <= ids


def test_numbers_are_those_of_the_run():
    text = re.sub(r"\s+", " ", page_of(a_run()))
    for said in (
        "<dt>tokens per second</dt><dd>4.0</dd>",
        "<dt>time to first token</dt><dd>0.50 s</dd>",
        "<dt>hit rate when decoding</dt><dd>75.0%</dd>",
        "3 of 4 experts were used; 1 of them (25.0% of all) served half",  # the prompt
        "<td>0</td><td>0</td><td>4</td>",  # layer, expert, tokens
        "step 2: 75.0 % hits, 25.0 % late hits, 0.0 % misses; waited 500.00 ms",
        '<td>experts</td><td class="bar" aria-hidden="true"><i style="width: 75.00%"></i></td>'
        "<td>150.00</td><td>75.0 %</td>",
        "<td>host</td><td>3</td><td>4</td><td>2.0 KiB</td>",
        '<th scope="row">host_memory</th><td>25%</td>',
    ):
        assert said in text
    data = re.search(r'id="data">(.*?)</script>', text)
    assert data is not None
    assert json.loads(data[1]) == {
        "maps": {"prefill": [[4, 0], [3, 1]], "decode": [[2, 0], [0, 2]]},
        "states": [[3, 0], [1, -1]],
    }


def test_a_run_without_a_decode_step_has_a_page_too():
    empty = np.zeros((2, 2), int)
    run = a_run(
        eam=RequestEam(np.array([[4, 0], [3, 1]]), empty), steps=[], tpot_s=None, ttft_s=None,
        seconds={"experts": 0.0},
    )  # fmt: skip
    text = page_of(run)
    assert len(Page(text).all("svg")) == 2
    assert "No decode step" in text


def test_many_steps_share_bars():
    steps = [PhaseCounters(hits=n % 2, misses=1) for n in range(1001)]
    page = Page(page_of(a_run(steps=steps)))
    bars = [each for each in page.all("g") if "data-text" in each]
    assert 0 < len(bars) <= run_page.MOST_BARS
    assert (bars[-1]["data-text"] or "").split(":")[0].endswith("1001")


def test_a_matrix_of_15000_experts_makes_a_small_page():
    counts = np.random.default_rng(0).integers(0, 50, (58, 256))
    run = a_run(eam=RequestEam(counts, counts), states_LE=np.zeros((58, 256), np.int8))
    assert len(page_of(run)) < 1_000_000


# Cells


def test_cells_of_one_colour_are_one_path():
    cells = np.array([[1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 1, 1]], dtype=bool)
    assert path_of(cells) == "M0 0h2v1h-2zM3 0h1v1h-1zM2 2h2v1h-2z"


def test_levels_are_steps_that_their_bounds_name():
    counts = np.arange(200).reshape(10, 20)
    levels, bounds = levels_of(counts)
    assert (levels == 0).sum() == 1
    for level in range(1, LEVELS + 1):
        assert counts[levels == level].max() == bounds[level - 1]
    assert levels_of(np.zeros((2, 2), int))[0].max() == 0


def test_states_that_no_expert_is_in_are_left_out():
    found = state_paths(np.array([[0, 0, 4], [3, 0, -1]], dtype=np.int8))
    assert [(each.name, each.num_experts) for each in found] == [
        ("used", 1),
        ("host", 1),
        ("disk", 3),
    ]


# Files and runs


def test_a_page_that_cannot_be_written_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match="could not be written: No space left on device"):
        write_page(a_run(), tmp_path / "out.html")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def moe(tiny_checkpoint) -> Iterator[MoE]:
    with MoE(tiny_checkpoint, host_memory="50%", policy="lru") as moe:
        yield moe


def test_steps_add_up_to_the_report(moe):
    before = moe.report().decode
    with counting_steps(moe) as seen:
        list(moe.stream("w5 w6 w9", max_new_tokens=6, do_sample=False))
    steps = decode_steps_of(seen)
    after = moe.report().decode
    assert [step.steps for step in steps] == [1] * 5
    for field in ("hits", "late_hits", "misses", "tokens"):
        assert sum(getattr(s, field) for s in steps) == getattr(after, field) - getattr(
            before, field
        )
    list(moe.stream("w5", max_new_tokens=2, do_sample=False))
    assert len(decode_steps_of(seen)) == 5, "nothing is watched any more"


def test_a_real_run_has_a_page_with_its_matrices(moe, tmp_path):
    settings = {"max_new_tokens": 6, "do_sample": False}
    stream = moe.stream("w5 w6 w9", **settings)
    with RunReports(report_html=tmp_path / "out.html").watching(moe, "w5 w6 w9", stream, settings):
        list(stream)
    text = (tmp_path / "out.html").read_text("utf-8")
    (eam,) = moe.request_eams()
    assert json.dumps(eam.decode.tolist()) in text
    assert stream.text in Page(text).texts


def test_run_writes_the_page_and_refuses_a_wrong_place_before_it_loads(
    command, tiny_checkpoint, tmp_path
):
    args = ["-p", "w5 w6", "--max-new-tokens", 4, "--report-html"]
    outcome = command("run", tiny_checkpoint, *args, tmp_path / "out.html")
    assert (outcome.code, outcome.err) == (0, "")
    assert "tokens written" in (tmp_path / "out.html").read_text("utf-8")
    outcome = command("run", "no-such-model", *args, tmp_path / "none" / "out.html")
    assert (outcome.code, outcome.said("does not exist")) == (1, True)
