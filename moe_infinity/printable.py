"""Texts of others, as they may be printed: no letter of them moves the cursor, changes the terminal
or the direction of writing, or is invisible.
"""

from __future__ import annotations

import unicodedata

HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories: control, format, surrogate, separators
SHOWN = "\n\t\u200c\u200d"  # ... but lines, and joiners, which emoji and many scripts need
MOST_LETTERS = 200


def printable(text: object, most_letters: int = MOST_LETTERS) -> str:
    """One line of at most so many letters, for a message."""
    line = printable_lines(str(text)[:most_letters])
    return line.replace("\n", "\\n").replace("\t", "\\t")


def printable_lines(text: str) -> str:
    """The text with escapes such as \\x1b in place of letters that are not shown as they are."""
    return text if text.isascii() and text.isprintable() else text.translate(_escapes)


class _Escapes(dict[int, str | int]):
    def __missing__(self, code: int) -> str | int:
        letter = chr(code)
        if unicodedata.category(letter) not in HIDDEN or letter in SHOWN:
            return code
        return letter.encode("unicode_escape").decode()


_escapes = _Escapes()
