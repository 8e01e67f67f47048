"""Fill the guides with what `moe-infinity inspect` and `plan` say of published models.

    python -m scripts.fill_guides            # writes docs/guides/*.md anew
    python -m scripts.fill_guides gpt-oss    # only guides whose name begins so

A guide asks by comments, and what lies between them is replaced:

    <!-- inspect: openai/gpt-oss-20b -->
    <!-- inspect: end -->
    <!-- plan: openai/gpt-oss-20b | ram=16GiB,disk=3GB/s -->
    <!-- plan: end -->

Nothing is downloaded: the commands get checkpoints without weights (hollow_checkpoints.py).
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.hollow_checkpoints import write_hollow

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ROOT / "docs" / "guides"
PLACE = re.compile(
    r"(?P<begin><!-- (?P<command>inspect|plan): (?P<model>[\w./-]+)(?: \| (?P<machine>\S+))? -->)\n"
    r"(?P<old>.*?)(?P<end><!-- (?P=command): end -->)",
    re.DOTALL,
)
Ask = Callable[[list[str]], str]  # what a command of `moe-infinity` prints


def asked(folder: Path, arguments: list[str]) -> str:
    """What a command prints; models are folders below `folder`, named by their ids."""
    command = [sys.executable, "-m", "moe_infinity", *arguments]
    environment = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "110"}
    done = subprocess.run(
        ["env", *(f"{name}={value}" for name, value in environment.items()), *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)}: {done.stderr}")
    return done.stdout


def filled(text: str, folder: Path, ask: Ask) -> str:
    """A guide with what the commands print in its places."""

    def replaced(place: re.Match[str]) -> str:
        model = place["model"]
        if not (folder / model).is_dir():
            write_hollow(model, folder / model)
        arguments = [place["command"], model]
        if place["machine"] is not None:
            arguments += ["--machine", place["machine"]]
        printed = "\n".join(line.rstrip() for line in ask(arguments).strip().splitlines())
        return f"{place['begin']}\n```text\n{printed}\n```\n{place['end']}"

    return PLACE.sub(replaced, text)


def main(begin: str = "") -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        for guide in sorted(GUIDES.glob(f"{begin}*.md")):
            text = guide.read_text(encoding="utf-8")
            guide.write_text(filled(text, folder, partial(asked, folder)), encoding="utf-8")
            print(guide.relative_to(ROOT))


if __name__ == "__main__":
    main(*sys.argv[1:])
