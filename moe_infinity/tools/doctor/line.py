"""What one check says."""

from __future__ import annotations

from typing import Literal, NamedTuple

State = Literal["ok", "warning", "error"]


class Line(NamedTuple):
    check: str
    state: State
    found: str
    hint: str = ""  # what to do; empty if all is well


def ok(check: str, found: str) -> Line:
    return Line(check, "ok", found)


def warning(check: str, found: str, hint: str) -> Line:
    return Line(check, "warning", found, hint)


def error(check: str, found: str, hint: str) -> Line:
    return Line(check, "error", found, hint)
