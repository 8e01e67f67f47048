"""`moe-infinity doctor` on this machine, and on one whose packages are broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from moe_infinity.errors import CheckpointError
from moe_infinity.tools.doctor import examination
from moe_infinity.tools.doctor.lines import Line, error, ok, warning
from moe_infinity.tools.planning import disk
from tests.system.other_systems import leave_linux

ROOT = Path(__file__).resolve().parents[3]


def without(name: str, *args: str) -> subprocess.CompletedProcess[str]:
    """The command where a package cannot be imported."""
    program = (
        f"import sys; sys.modules[{name!r}] = None; from moe_infinity.__main__ import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *args],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )


@pytest.fixture
def found(monkeypatch):
    """found(lines): what the examination of this machine gives."""

    def make(*lines: Line) -> None:
        monkeypatch.setattr(examination, "examine", lambda *, is_quick: iter(lines))

    return make


def test_this_machine_is_looked_at_and_nothing_is_left_behind(command, tmp_path, monkeypatch):
    monkeypatch.setattr(examination, "hub_cache", lambda: tmp_path / "hub")
    outcome = command("doctor", "--quick", "--json")
    told = json.loads(outcome.out)
    lines = {line["check"]: line for line in told["lines"]}
    assert lines["torch"]["state"] == "ok", lines["torch"]
    assert {"processor", "memory", "kernels", "hub cache", "direct reads"} <= lines.keys()
    assert "disk rate" not in lines
    assert told["errors"] == sum(line["state"] == "error" for line in told["lines"])
    assert outcome.code == bool(told["errors"])
    assert list(tmp_path.iterdir()) == []


def test_only_errors_end_in_exit_code_1(command, found):
    found(ok("a", "well"), warning("b", "so so", "do this"))
    outcome = command("doctor")
    assert outcome.code == 0
    assert "0 errors, 1 warnings" in outcome.err
    found(ok("a", "well"), error("b", "bad", "do this"))
    outcome = command("doctor")
    assert outcome.code == 1
    assert outcome.out.splitlines() == [
        "ok       a                  well",
        "error    b                  bad",
        "                            -> do this",
    ]


def test_a_missing_torch_is_a_line_and_no_traceback():
    done = without("torch", "doctor", "--quick", "--json")
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    lines = {line["check"]: line for line in json.loads(done.stdout)["lines"]}
    assert lines["torch"]["state"] == "error"
    assert "cannot be imported" in lines["torch"]["finding"]
    assert lines["memory"]["state"] != "error"
    assert lines["direct reads"]["state"] != "error"


def test_what_doctor_itself_needs_is_named():
    done = without("psutil", "doctor")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "pip install psutil" in done.stderr


def test_a_check_that_fails_is_a_line():
    def fails() -> Line:
        raise RuntimeError("no such thing\nmore of it")

    (line,) = examination.lines_of("gpu", fails)
    assert line.state == "error"
    assert line.finding == "could not be looked at: RuntimeError: no such thing"


def test_a_disk_that_cannot_be_measured_is_a_warning_with_its_hint(monkeypatch, tmp_path):
    def refuse(folder: Path) -> float:
        raise CheckpointError("no room\nhint: another folder")

    monkeypatch.setattr(disk, "measure_disk", refuse)
    line = examination._rate(tmp_path)
    assert line == warning("disk rate", "not measured: no room", "another folder")


def test_a_folder_that_cannot_be_written_is_not_tried(monkeypatch, tmp_path):
    def refuse(*args: object, **options: object) -> None:
        raise PermissionError

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    assert ["not tried" in line.finding for line in examination._tried(tmp_path)] == [True, True]


def test_on_other_systems_the_same_is_asked_and_no_check_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(examination, "hub_cache", lambda: tmp_path)
    leave_linux(monkeypatch)
    lines = list(examination.examine(is_quick=True))
    assert not [line for line in lines if "could not be looked at" in line.finding]
    (direct,) = [line for line in lines if line.check == "direct reads"]
    assert direct.state == "warning"
