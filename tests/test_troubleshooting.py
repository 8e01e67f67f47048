"""docs/troubleshooting.md explains every message that the package raises, and no other.

A row of a class's table begins with fragments of messages, `…` in place of values. A message is its
first line as the code writes it. Where the code passes on what somebody else says, the fragment is
the name of the file.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import moe_infinity.errors

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "troubleshooting.md"
VALUE = "…"
LEAST_LETTERS = 5  # of a message's own; with fewer it is somebody else's


class Site(NamedTuple):
    error: str  # the class of errors.py
    message: str  # the first line, VALUE in place of values
    file: str  # as in moe_infinity/config.py


def text_of(node: ast.expr) -> str:
    """The text that an expression surely has, and VALUE for all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left) + text_of(node.right)
    return VALUE


@cache
def own_errors() -> dict[str, str]:
    """Every class of errors.py under its name, and every subclass under its parent's."""
    known = {name: name for name in vars(moe_infinity.errors) if name[0].isupper()}
    trees = [ast.parse(path.read_text()) for path in (ROOT / "moe_infinity").rglob("*.py")]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in range(3):  # subclasses of subclasses
        for node in classes:
            for base in map(ast.unparse, node.bases):
                if base.rpartition(".")[2] in known:
                    known.setdefault(node.name, known[base.rpartition(".")[2]])
    return known


def sites() -> Iterator[Site]:
    """Where an error of ours is made with a message."""
    known = own_errors()
    for path in sorted((ROOT / "moe_infinity").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in known:
                message = text_of(node.args[0]).partition("\n")[0]
                yield Site(known[name], message, path.relative_to(ROOT).as_posix())


def explained() -> dict[str, list[str]]:
    """Fragments by class, from the first cells of the page's tables."""
    fragments: dict[str, list[str]] = defaultdict(list)
    error = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            error = line.removeprefix("## ").partition(":")[0]
        elif line.startswith("| `"):
            fragments[error] += re.findall(r"`([^`]+)`", line.split("|")[1])
    return fragments


def is_explained_by(site: Site, fragment: str) -> bool:
    own = sum(letter.isalpha() for letter in site.message)
    return fragment == site.file if own < LEAST_LETTERS else fragment in site.message


SITES = sorted(set(sites()))


@pytest.mark.parametrize("error", sorted({site.error for site in SITES}))
def test_every_message_is_explained(error):
    fragments = explained()[error]
    missing = [
        f"{site.file}: {site.message}"
        for site in SITES
        if site.error == error and not any(is_explained_by(site, part) for part in fragments)
    ]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("error", sorted(set(explained()) & set(own_errors())))
def test_every_explained_message_is_raised(error):
    of_error = [site for site in SITES if site.error == error]
    gone = [
        fragment
        for fragment in explained()[error]
        if not any(is_explained_by(site, fragment) for site in of_error)
    ]
    assert not gone


def test_every_class_of_errors_has_a_section():
    named = {
        line[3:].partition(":")[0] for line in PAGE.read_text().splitlines() if line[:3] == "## "
    }
    assert named >= {name for name in own_errors().values() if name != "Cancelled"}


def test_a_fragment_is_long_enough_to_mean_one_thing():
    whole = {site.message for site in SITES}
    short = [part for parts in explained().values() for part in parts if len(part) < 10]
    assert not set(short) - whole
