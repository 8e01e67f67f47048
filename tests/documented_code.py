"""Code blocks of pages, and what a test puts in place of what it does not have.

The bundled model stands for every model, a GGUF file of it for every GGUF file, the CPU for a GPU.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DEMO = str(ROOT / "models" / "demo")
FOLDERS = ("start", "guides", "how", "coming-from")
PAGES = [
    ROOT / "README.md",
    *sorted(page for f in FOLDERS for page in (ROOT / "docs" / f).glob("*.md")),
]
BLOCK = re.compile(r"^```(?P<language>\S*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
SERVER = "127.0.0.1:8000"
MODEL = re.compile(r"(?:Qwen|openai|deepseek-ai|zai-org)/[\w.-]+|MODEL|models/demo")
NAMED = re.compile(r"\bQwen3-30B-A3B\b")  # a model as a server calls it
SIZE = re.compile(r"\d+(?:\.\d+)?[GM]i?B")

# Commands that are not run, by how they begin, and why.
NOT_RUN = {
    "python3 -m venv": "an environment without what tests need",
    "make": "installs, or needs a checkout of its own",
    "source": "changes the shell",
    "pip install": "installs",
    "export": "is for the program of the next line",
    "claude": "a program of others; `make test-clients` runs it and those below",
    "copilot": "a program of others",
    "qwen": "a program of others",
    "cline": "a program of others",
    "aider": "a program of others",
    "open-webui": "a program of others",
}
# Commands of ours that are only parsed: an unknown command or option fails.
ONLY_PARSED = {
    "serve": "waits for requests; the slow test starts it",
    "chat": "waits for a person; the slow test talks to a server with it",
    "pull": "downloads",
}
SIZES_OF = ("--host-memory", "--device-memory")
FOR_A_GPU = ("--device", "--device-memory")


class Block(NamedTuple):
    page: Path
    language: str
    code: str

    @property
    def needs_server(self) -> bool:
        return SERVER in self.code


def blocks_of(page: Path) -> Iterator[Block]:
    for found in BLOCK.finditer(page.read_text(encoding="utf-8")):
        yield Block(page, found["language"], found["code"])


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of every command, without comments."""
    for line in block.code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def begins_with(words: list[str], begins: dict[str, str]) -> bool:
    return any(words[: len(begin.split())] == begin.split() for begin in begins)


def substituted(words: list[str], gguf: Path) -> list[str]:
    """Arguments of `moe-infinity` as they are run here."""
    command = words[0]
    words = [str(gguf) if word.endswith(".gguf") else MODEL.sub(DEMO, word) for word in words]
    given: list[str] = []
    skipped = False
    for name, word in zip(["", *words], words, strict=False):
        if skipped or word in FOR_A_GPU:
            skipped = not skipped  # the option, then its value
            continue
        given.append("25%" if name in SIZES_OF and SIZE.fullmatch(word) else word)
    if command == "run" and "--max-new-tokens" not in given:
        given += ["--max-new-tokens", "4"]
    if command == "doctor" or (command == "plan" and "--machine" not in given):
        given.append("--quick")
    return given


def python_of(block: Block, address: str = SERVER) -> str:
    code = NAMED.sub("demo", MODEL.sub(DEMO, block.code))
    return code.replace(SERVER, address)
