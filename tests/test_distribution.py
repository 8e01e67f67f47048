"""What is published works where nothing of the repository is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from scripts.build_dist import ROOT, build_dist

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("build") is None, reason="needs the package build"),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a clone: git names the files"),
]
DATA = {
    str(file.relative_to(ROOT))
    for pattern in (
        "server/page/*",
        "tools/pictures/page/*",
        "tools/planning/curves.json",
        "py.typed",
    )
    for file in ROOT.glob(f"moe_infinity/{pattern}")
}
MODULES = {str(file.relative_to(ROOT)) for file in ROOT.glob("moe_infinity/**/*.py")}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that `make dist` builds."""
    folder = tmp_path_factory.mktemp("dist")
    build_dist(folder)
    return folder


@dataclass(frozen=True)
class Installed:
    """An environment with both wheels. torch and the other packages are those of this one."""

    folder: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A program of that environment, in an empty folder and with caches of its own."""
        away = self.folder / "empty"
        away.mkdir(exist_ok=True)
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        environment["XDG_CACHE_HOME"] = str(self.folder / "cache")
        program = self.folder / "bin" / command[0]
        return subprocess.run(
            [program, *command[1:]], cwd=away, env=environment, capture_output=True, text=True
        )


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
    wheels = sorted(map(str, dist.glob("*.whl")))
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", *wheels], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # Packages only: what .pth files there add, such as this repository, stays out.
    (site / "packages.pth").write_text(str(Path(torch.__file__).parents[1]))
    return Installed(folder)


def test_the_wheel_has_all_modules_their_pages_and_curves_and_the_licence_and_nothing_else(dist):
    (wheel,) = dist.glob("moe_infinity-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    own = {name for name in names if ".dist-info/" not in name}
    assert own == {*MODULES, *DATA}
    assert [name for name in names if name.endswith("/licenses/LICENSE")]


def test_the_sdist_has_the_package_without_tests(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        folders = {Path(name).parts[1] for name in archive.getnames() if "/" in name}
    assert {"moe_infinity", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"} <= folders
    assert not folders & {"tests", "models", "benchmarks", "docs", "scripts", "tools"}


def test_the_demo_wheel_has_the_model_its_card_and_the_licence(dist):
    (wheel,) = dist.glob("moe_infinity_demo-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    models = {"demo": "moe_infinity_demo", "demo-long": "moe_infinity_demo/long"}
    model = {f"{models[f.parent.name]}/{f.name}" for f in (ROOT / "models").glob("demo*/*")}
    assert {name for name in names if ".dist-info/" not in name} == model
    assert [name for name in names if name.endswith("/licenses/LICENSE")]


def test_the_same_commit_gives_the_same_wheels(dist, tmp_path):
    build_dist(tmp_path)
    wheels = [file.name for file in dist.glob("*.whl")]
    assert len(wheels) == 2
    assert all((dist / name).read_bytes() == (tmp_path / name).read_bytes() for name in wheels)


def test_nothing_of_the_repository_is_on_the_path_of_the_installed_package(installed):
    code = "import moe_infinity, sys; print(moe_infinity.__file__); print(*sys.path, sep='\\n')"
    file, *path = installed.run("python", "-c", code).stdout.splitlines()
    assert Path(file).is_relative_to(installed.folder)
    assert str(ROOT) not in path


def test_the_installed_command_has_help_and_the_version_of_the_project(installed):
    assert "Usage" in installed.run("moe-infinity", "--help").stdout
    version = next(
        line.split('"')[1]
        for line in (ROOT / "pyproject.toml").read_text("utf-8").splitlines()
        if line.startswith("version = ")
    )
    assert installed.run("moe-infinity", "--version").stdout == f"moe-infinity {version}\n"


def test_the_installed_command_runs_the_demo_and_compiles_its_kernels(installed):
    settings = ("--max-new-tokens", "4", "--host-memory", "25%", "--json")
    done = installed.run("moe-infinity", "run", "demo", "-p", "The old house stood", *settings)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 4
    assert list((installed.folder / "cache").glob("moe-infinity/kernels/**/*.nbc"))
