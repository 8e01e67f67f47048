"""Files that documentation and docstrings name are there, and links lead somewhere."""

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
HISTORY = {ROOT / "notes" / "log.md"}  # it names what was there at the time
GUIDES = {ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")} - HISTORY
PAGES = sorted(GUIDES | HISTORY | {ROOT / "CHANGELOG.md", ROOT / "models" / "demo" / "README.md"})
LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?![a-z]+:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
IMAGE = re.compile(r"!\[(?P<words>[^\]]*)\]\((?P<path>[^)\s]*)\)")
CODE = re.compile(r"^(```|~~~).*?^\1$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
MODULES = set((ROOT / "moe_infinity").rglob("*.py"))
NAME = re.compile(r"(?<![\w/.:-])\w[\w./-]*\.(?:py|md)\b")  # no part of a URL, no ../


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


def anchors_of(page: Path) -> set[str]:
    """As GitHub and the site name the headings of a page."""
    anchors: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
        anchors.add(words.replace(" ", "-"))
    return anchors


def id_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_every_link_leads_somewhere(page):
    broken = []
    for link in LINK.finditer(CODE.sub("", page.read_text(encoding="utf-8"))):
        target = page.parent / link["path"] if link["path"] else page
        if not target.exists() or link["anchor"] and link["anchor"] not in anchors_of(target):
            broken.append(link[0])
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=id_of)
def test_every_picture_is_there_and_says_in_words_what_it_shows(page):
    for image in IMAGE.finditer(CODE.sub("", page.read_text(encoding="utf-8"))):
        assert (page.parent / image["path"]).is_file()
        assert image["words"]
