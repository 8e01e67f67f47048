"""Each promise of SECURITY.md names tests, and they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROWS = re.findall(
    r"^\| (?!promise|-)(.+?) \| (.+?) \|$", (ROOT / "SECURITY.md").read_text("utf-8"), re.M
)
TEST = re.compile(r"`(tests/[a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`")


def functions_of(file: Path) -> set[str]:
    """Return the names of the functions that a file defines."""
    tree = ast.parse(file.read_text("utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("promise", "tests"), ROWS, ids=[promise for promise, _ in ROWS])
def test_a_promise_names_tests_that_exist(promise, tests):
    named = TEST.findall(tests)
    assert len(named) == tests.count("`") // 2 > 0
    for file, name in named:
        assert name in functions_of(ROOT / file), name


def test_every_section_has_promises():
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    sections = text.split("\n### ")[1:]
    assert len(sections) == 6
    assert sum(section.count("::test_") > 0 for section in sections) == 6
    assert len(ROWS) > 30
