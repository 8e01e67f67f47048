"""Grammars and regular expressions as Outlines and guidance write and send them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from moe_infinity.server.grammars import Structure, part_of
from moe_infinity.server.protocol import CompletionBody

LARK = [
    'start: "hot" | "cold"',
    '?start: "it is " KIND\nKIND: "hot" | "cold"',
    '!start: "it is " kind\n?kind: "hot" -> hot | "cold"',
    "// weather\n%import common.INT\n?start: INT",
    '%llguidance {}\nstart: "hot" | "cold"',
    'start: name "::=" name\nname: /[a-z]+/',
]


@pytest.mark.parametrize("text", [*LARK, 'root ::= "hot" | "cold"'])
def test_a_grammar_may_be_in_any_lark_or_in_gbnf(text):
    part = part_of(Structure("grammar", text, "x"), "x")
    assert LLMatcher.validate_grammar(json.dumps({"grammars": [part.grammar]})) == ""


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_the_same_structure_under_two_names_is_one(kind):
    """So guidance says it, for vLLM of any version."""
    body: dict[str, Any] = {
        "prompt": "w5",
        f"guided_{kind}": "a",
        "structured_outputs": {kind: "a"},
    }
    structure = CompletionBody.model_validate(body).structure
    assert structure == Structure(kind, "a", f"structured_outputs.{kind}")
