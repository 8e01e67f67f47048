"""Texts of others: names and values from files, which may hold anything."""

from __future__ import annotations


def printable(text: object, most: int | None = None) -> str:
    """Return a text as one line that is safe to show: what a terminal would obey (control
    characters, changes of direction) is written as an escape, and what is longer than `most`
    characters is cut.
    """
    whole = str(text)
    shown = whole if most is None or len(whole) <= most else f"{whole[:most]}..."
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
