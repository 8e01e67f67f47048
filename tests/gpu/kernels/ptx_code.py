"""The text of PTX as a list of instructions; for ptx.py."""

from __future__ import annotations

import re
from dataclasses import dataclass

LINE = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


@dataclass(frozen=True, slots=True)
class Instruction:
    text: str
    guard: str | None  # a predicate
    is_negated: bool
    name: list[str]  # between the dots
    operands: list[str]


def code_of(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and where labels are."""
    body = ptx[ptx.index("{", ptx.index(".entry")) + 1 :]
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in body.splitlines():
        text = line.split("//")[0].strip().rstrip(";").strip()
        if label := re.match(r"(\$L\w+):", text):
            labels[label[1]] = len(found)
        elif text and text[0] not in ".$}{(" and (parts := LINE.fullmatch(text)):
            negated, guard, name, rest = parts.groups()
            operands = OPERAND.findall(rest)
            found.append(Instruction(text, guard, bool(negated), name.split("."), operands))
    return found, labels
