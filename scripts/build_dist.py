"""Build what is published: sdist and wheel of the package, and the wheel of the bundled model.

    python scripts/build_dist.py dist

From copies of the files that git tracks, so that nothing else gets in and the tree stays clean.
Files keep the time of the last commit (SOURCE_DATE_EPOCH): the same commit gives the same wheels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODELS = "models"  # a project of its own, beside its model


def build_dist(out: Path, root: Path = ROOT) -> None:
    """Write the files into `out`. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "package"
        copy_tracked(root, copy)
        models = Path(shutil.move(copy / MODELS, Path(folder) / MODELS))
        shutil.copy(copy / "LICENSE", models)
        build(copy, out)
        build(models, out, "--wheel")


def copy_tracked(root: Path, copy: Path) -> None:
    """The files as they are now, changes that are not committed included."""
    for name in output_of("git", "-C", str(root), "ls-files", "-z").split("\0"):
        if name and (root / name).is_file():
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, target)


def build(project: Path, out: Path, *kinds: str) -> None:
    epoch = output_of("git", "-C", str(ROOT), "log", "-1", "--format=%ct").strip()
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *kinds]
    environment = {"SOURCE_DATE_EPOCH": epoch, **os.environ}
    subprocess.run([*command, str(project)], env=environment, check=True, stdout=sys.stderr)


def output_of(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    build_dist(Path(sys.argv[1]).resolve())
