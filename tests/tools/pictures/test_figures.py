"""Pictures: what they show is what was measured, whatever names it has; or nothing is written."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from moe_infinity.errors import ConfigError, OutputError
from moe_infinity.predict.tracefile import Trace, save_trace
from moe_infinity.tools.pictures import figures
from moe_infinity.tools.pictures.figures import (
    COLOURS,
    check_picture,
    covered,
    draw_activation,
    draw_hit_rates,
    matrix_of,
)
from moe_infinity.tools.simulator.baselines import SIMULATED_POLICIES
from moe_infinity.tools.simulator.replay import OMNISCIENT
from tests.tools.simulator.traces import one_after_the_other

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "a <script>alert(1)</script> & $x^{ 漢字 \x01\udc80 " + "long " * 40


def row(policy: str, capacity: str, rate: float, **others: Any) -> dict[str, Any]:
    about = {"trace": "some/trace.npz", "phase": "decode", "num_slots": 9}
    return about | {"policy": policy, "capacity": capacity, "hit_rate": rate} | others


ROWS = [
    row("lru", "10%", 0.1), row("lru", "20%", 0.3), row("belady", "10%", 0.5),
    row("belady", "20%", 0.7), row("lru", "20%", 0.99, phase="prefill"),
]  # fmt: skip


def texts_of(svg: Path) -> list[str]:
    return ["".join(each.itertext()) for each in ElementTree.parse(svg).iter(f"{SVG}text")]


def points_of(svg: Path, policy: str) -> list[tuple[float, float]]:
    """Of the line of a policy, in points from the left and from the top."""
    (group,) = [
        g for g in ElementTree.parse(svg).iter(f"{SVG}g") if g.get("id") == f"policy-{policy}"
    ]
    path = group.find(f"{SVG}path")
    assert path is not None
    numbers = [float(number) for number in re.findall(r"[\d.]+", path.get("d", ""))]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_every_policy_has_a_colour_and_a_marker():
    assert set(COLOURS) == {*SIMULATED_POLICIES, *OMNISCIENT} == set(figures.MARKERS)
    assert len(set(COLOURS.values())) == len(COLOURS)


def test_a_picture_of_hit_rates_has_a_line_with_the_values_of_every_policy(tmp_path):
    draw_hit_rates(ROWS, tmp_path / "out.svg")
    lru, belady = (points_of(tmp_path / "out.svg", policy) for policy in ("lru", "belady"))
    assert [x for x, _ in lru] == [x for x, _ in belady]
    # 10 percentage points are as long everywhere, and Belady is above.
    heights = [lru[0][1] - y for _, y in (*lru, *belady)]
    assert np.array(heights) / heights[1] == pytest.approx([0, 1, 2, 3], abs=1e-3)
    texts = texts_of(tmp_path / "out.svg")
    assert texts.index("belady") < texts.index("lru")
    assert {"trace", "decode hit rate, %", "slots, % of all experts"} <= set(texts)


def test_capacities_in_slots_are_places_of_a_scale_of_slots(tmp_path):
    rows = [row("belady", str(n), n / 10, num_slots=n) for n in (2, 4, 8)]
    draw_hit_rates(rows, tmp_path / "out.svg")
    (x2, _), (x4, _), (x8, _) = points_of(tmp_path / "out.svg", "belady")
    assert (x8 - x4) / (x4 - x2) == pytest.approx(2, abs=1e-3)
    assert "slots" in texts_of(tmp_path / "out.svg")


def test_one_capacity_gives_bars_with_numbers(tmp_path):
    draw_hit_rates([each for each in ROWS if each["capacity"] == "10%"], tmp_path / "out.svg")
    texts = texts_of(tmp_path / "out.svg")
    assert {"10.0", "50.0", "lru", "belady", "decode hit rate in %, capacity 10%"} <= set(texts)


def test_every_trace_has_a_panel_and_prompts_are_drawn_where_nothing_was_decoded(tmp_path):
    rows = [
        row("lru", "5", 0.5, trace=name, phase="prefill") for name in ("b.npz", "x/experts.npz")
    ]
    draw_hit_rates(rows, tmp_path / "out.svg")
    texts = texts_of(tmp_path / "out.svg")
    assert {"b", "x"} <= set(texts)
    assert texts.count("prefill hit rate in %, capacity 5") == 2


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_hostile_name_is_text_and_nothing_else(tmp_path, kind):
    path = tmp_path / f"out.{kind}"
    draw_hit_rates([each | {"trace": f"/{HOSTILE}.npz"} for each in ROWS], path)
    sequences = one_after_the_other([(3, 4)])
    draw_activation(Trace(sequences, 6), tmp_path / f"other.{kind}", name=HOSTILE)
    if kind == "svg":
        for file in (path, tmp_path / "other.svg"):
            assert not list(ElementTree.parse(file).iter(f"{SVG}script"))
            assert any("$x^{" in text for text in texts_of(file)), file


def test_the_same_rows_give_the_same_file(tmp_path):
    for name in ("one.svg", "two.svg"):
        draw_hit_rates(ROWS, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_covered_is_the_share_of_the_experts_used_most():
    assert covered(np.array([[1, 0], [6, 3]])) == pytest.approx([0, 60, 90, 100, 100])
    assert covered(np.zeros((2, 2))) == pytest.approx([0] * 5)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("out.pdf", ConfigError, "a picture ends in .svg or .png"),
        ("none/out.svg", OutputError, "the folder .* does not exist"),
        ("folder.svg", OutputError, "no file can be written there"),
    ],
)
def test_a_wrong_place_is_said_before_anything_is_drawn(tmp_path, name, error, said):
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(error, match=said):
        check_picture(tmp_path / name)


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"hint: pip install 'moe-infinity\[plot\]'"):
        check_picture(tmp_path / "out.svg")


def test_a_disk_that_fills_up_leaves_the_old_picture(tmp_path):
    resource = pytest.importorskip("resource", reason="POSIX only")
    path = tmp_path / "out.svg"
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OutputError, match="could not be written: File too large"):
            draw_hit_rates(ROWS, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


def test_an_interrupted_picture_is_not_there(tmp_path, monkeypatch):
    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        draw_hit_rates(ROWS, tmp_path / "out.svg")
    assert list(tmp_path.iterdir()) == []


def test_matplotlib_is_imported_only_to_draw():
    """Start-up is fast, and the extra may be missing."""
    code = "import sys, moe_infinity.__main__; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Commands


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.npz"
    save_trace(path, one_after_the_other([(3, 9), (2, 8)]), num_experts=6)
    return path


def test_simulate_draws_its_rows(command, trace, tmp_path):
    args = ["--policy", "lru", "--capacity", "5,9", "--jobs", 1, "--plot", tmp_path / "out.svg"]
    outcome = command("simulate", trace, *args, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    rates = {
        (row["policy"], row["capacity"]): row["hit_rate"]
        for row in json.loads(outcome.out)["rows"]
        if row["phase"] == "decode"
    }
    lru = points_of(tmp_path / "out.svg", "lru")
    belady = points_of(tmp_path / "out.svg", "belady")
    rise = (rates["belady", "9"] - rates["lru", "5"]) / (rates["lru", "9"] - rates["lru", "5"])
    assert (belady[1][1] - lru[0][1]) / (lru[1][1] - lru[0][1]) == pytest.approx(rise, abs=1e-3)


def test_simulate_refuses_a_picture_before_it_replays(command, trace, tmp_path):
    for name, said in (
        ("out.gif", "a picture ends in .svg or .png"),
        ("no/out.svg", "does not exist"),
    ):
        outcome = command("simulate", trace, "--plot", tmp_path / name)
        assert (outcome.code, outcome.out) == (1, "")
        assert outcome.said(said)
    assert list(tmp_path.iterdir()) == [trace]


def test_trace_draws_what_it_recorded(command, tiny_checkpoint, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w5 w6 w9"}\n{"prompt": "w7"}')
    args = ["--prompts", prompts, "-o", tmp_path / "out.npz", "--max-new-tokens", 5]
    outcome = command("trace", tiny_checkpoint, *args, "--plot", tmp_path / "out.svg")
    assert outcome.code == 0
    texts = texts_of(tmp_path / "out.svg")
    assert f"{tiny_checkpoint.name}: 2 requests, 12 tokens" in texts
    assert {"expert", "MoE layer", "one request, on average", "all requests"} <= set(texts)
    outcome = command("trace", tiny_checkpoint, *args, "--plot", tmp_path / "no" / "out.svg")
    assert (outcome.code, outcome.said("does not exist")) == (1, True)


def test_a_matrix_counts_tokens():
    experts_TLK = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 4]]])
    assert matrix_of(experts_TLK, (2, 5)).tolist() == [[2, 1, 1, 0, 0], [0, 0, 2, 1, 1]]
