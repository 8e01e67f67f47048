"""Pages make text of what comes from outside: none of their sources can make markup of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import moe_infinity

PACKAGE = Path(moe_infinity.__file__).parent
SCRIPTS = sorted(
    file
    for folder in ("server/page", "tools/pictures/page")
    for file in (PACKAGE / folder).glob("*.js")
    if not file.name.endswith(".min.js")  # of others; pages take its tokens, not its HTML
)
TEMPLATES = sorted(PACKAGE.glob("**/page/*.html"))
# DOMParser may stay: what it makes is not shown, and code.js takes its texts and classes only.
MAKES_MARKUP = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|setHTML"
    r"|createContextualFragment|\beval\(|new Function|javascript:|setAttribute\(\"on"
)
IS_NOT_ESCAPED = re.compile(r"\|\s*safe|autoescape\s+false|Markup")


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_no_script_makes_markup_of_text(file):
    assert not MAKES_MARKUP.findall(file.read_text("utf-8"))


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.name)
def test_no_template_leaves_text_as_markup(file):
    assert not IS_NOT_ESCAPED.findall(file.read_text("utf-8"))


def test_all_pages_were_looked_at():
    assert {"page.js", "chat.js", "markdown.js", "run.js"} <= {file.name for file in SCRIPTS}
    assert {"index.html", "run.html"} <= {file.name for file in TEMPLATES}
