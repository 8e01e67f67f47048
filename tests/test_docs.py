"""Files that the documentation and the package's docstrings name are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STARTS = (ROOT, ROOT / "moe_infinity", ROOT / "docs")  # that names may be relative to
FOLDERS = ("moe_infinity", "docs", "tests", "benchmarks", "scripts", "tools", "examples", "models")
BARE_NAMES = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}
NOT_OURS = {"docs/decisions/NNNN-title.md"}  # a pattern of names
# They name what was there at the time.
HISTORY = {ROOT / "docs" / "log.md", *(ROOT / "docs" / "decisions").glob("*.md")}
GUIDES = {ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")} - HISTORY
MODULES = set((ROOT / "moe_infinity").rglob("*.py"))
NAME = re.compile(r"(?<![\w/.:])\w[\w./-]*\.(?:py|md)\b")  # no part of a URL, no ../


def documented(path: Path) -> Iterator[str]:
    """All text of a guide, the docstrings of a module."""
    text = path.read_text(encoding="utf-8")
    if path in GUIDES:
        yield text
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def is_there(name: str) -> bool:
    return name in BARE_NAMES | NOT_OURS or any((start / name).is_file() for start in STARTS)


@pytest.mark.parametrize(
    "path", sorted(GUIDES | MODULES), ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_every_file_that_is_named_exists(path):
    names = {name for text in documented(path) for name in NAME.findall(text)}
    assert not [name for name in sorted(names) if not is_there(name)]
