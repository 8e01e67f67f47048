"""What `make audit` says of known faults and licences, and pins with hashes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from scripts import audit

ROOT = Path(__file__).resolve().parents[1]
SOUND = {"name": "rich", "version": "15.0.0", "vulns": []}
UNKNOWN = {"name": "gguf", "skip_reason": "Dependency not found on PyPI"}
FAULT = {"id": "PYSEC-1", "fix_versions": ["3.1.7"], "description": "", "aliases": []}
FAULTY = {"name": "jinja2", "version": "3.1.6", "vulns": [FAULT]}
MIT = {"Name": "rich", "Version": "15.0.0", "License": "MIT"}


def audited(
    monkeypatch: pytest.MonkeyPatch, faults: str, licences: list[Any], stderr: str = ""
) -> int:
    """Return the exit status of an audit whose tools say this."""

    def run(module: str, *arguments: str) -> Any:
        said = faults if module == "pip_audit" else json.dumps(licences)
        return SimpleNamespace(stdout=said, stderr=stderr, check_returncode=lambda: None)

    monkeypatch.setattr(audit, "run", run)
    with pytest.raises(SystemExit) as ended:
        audit.main()
    return int(ended.value.code or 0)


def test_sound_packages_pass(monkeypatch, capsys):
    assert audited(monkeypatch, json.dumps({"dependencies": [SOUND]}), [MIT]) == 0
    assert capsys.readouterr().out == "1 packages checked for known faults\n1 licences checked\n"


def test_a_known_fault_fails_and_is_named_with_the_version_that_mends_it(monkeypatch, capsys):
    assert audited(monkeypatch, json.dumps({"dependencies": [SOUND, FAULTY]}), [MIT]) == 1
    assert "known fault: jinja2 3.1.6: PYSEC-1, mended in 3.1.7\n" in capsys.readouterr().out


def test_a_package_that_the_database_does_not_know_is_named(monkeypatch, capsys):
    assert audited(monkeypatch, json.dumps({"dependencies": [SOUND, UNKNOWN]}), [MIT]) == 0
    assert "NOT CHECKED, as the database does not know them: gguf\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "stderr"),
    [
        ("", "Traceback ...\nConnectionError: no such host\n"),
        ("", ""),
        (json.dumps({"dependencies": [UNKNOWN]}), ""),
        (json.dumps({"dependencies": []}), ""),
    ],
)
def test_without_the_database_it_says_that_nothing_was_checked(said, stderr, monkeypatch, capsys):
    assert audited(monkeypatch, said, [MIT], stderr) == 0
    out = capsys.readouterr().out
    assert out.startswith("NOT CHECKED for known faults")
    assert "checked for known faults" not in out.replace("NOT CHECKED for known faults", "")
    if stderr:
        assert "no such host" in out


@pytest.mark.parametrize(
    "licence", ["GPL-3.0-only", "UNKNOWN", "MIT AND AGPL-3.0-only", "", "MITX"]
)
def test_a_licence_that_is_not_allowed_fails(licence, monkeypatch, capsys):
    packages = [MIT, {"Name": "other", "Version": "1", "License": licence}]
    assert audited(monkeypatch, json.dumps({"dependencies": [SOUND]}), packages) == 1
    assert f"licence that is not allowed: other 1: {licence}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "licence",
    [
        "MIT",
        "Apache-2.0 OR BSD-2-Clause",
        "MPL-2.0 AND (MIT OR Apache-2.0)",
        "MIT License; DFSG approved",
        "Mozilla Public License 2.0 (MPL 2.0)",
        "BSD-2-Clause AND Apache-2.0 WITH LLVM-exception",
    ],
)
def test_licences_are_read_as_packages_write_them(licence):
    assert audit.is_allowed("some", licence)


def test_proprietary_licences_are_allowed_for_what_comes_with_torch_only():
    assert audit.is_allowed("nvidia-cublas", "NVIDIA Proprietary Software")
    assert not audit.is_allowed("other", "NVIDIA Proprietary Software")


# pins

PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^;\s\\]+)", re.M)


def name_of(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def pins_of(file: str) -> dict[str, set[str]]:
    """Return the versions of each package that a file names."""
    found: dict[str, set[str]] = {}
    for package, version in PIN.findall((ROOT / file).read_text("utf-8")):
        found.setdefault(name_of(package), set()).add(version)
    return found


@pytest.mark.parametrize("file", ["runtime", "release"])
def test_every_pin_of_a_release_has_hashes_and_is_that_of_the_tests(file):
    text = (ROOT / f"requirements/{file}.txt").read_text("utf-8")
    tested = pins_of("constraints.txt")
    pins = pins_of(f"requirements/{file}.txt")
    assert {name: versions - tested.get(name, set()) for name, versions in pins.items()} == {
        name: set() for name in pins
    }
    for entry in re.split(r"\n(?=[a-z0-9])", text):
        if PIN.match(entry):
            assert "--hash=sha256:" in entry, entry[:80]


def test_what_the_package_requires_is_pinned_with_hashes_but_torch():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    lists = re.findall(r"^(?:dependencies|serve) = \[\n(.*?)^\]", project, re.M | re.S)
    needed = {name_of(name) for name in re.findall(r'"([A-Za-z0-9_.-]+)', "".join(lists))}
    assert needed - pins_of("requirements/runtime.txt").keys() == {"torch"}


def test_what_make_dist_calls_is_pinned_with_hashes():
    needed = (ROOT / "requirements/release.in").read_text("utf-8").split("\n")
    names = {name_of(line) for line in needed if line and not line.startswith("#")}
    assert names <= pins_of("requirements/release.txt").keys()
    recipe = subprocess.run(
        ["make", "--dry-run", "dist"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "--require-hashes --no-deps -r requirements/release.txt" in recipe
    assert "requirements/runtime.txt" in recipe
