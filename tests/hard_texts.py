"""Texts on which tokenizers differ: all scripts, runs of white space, signs, numbers, emoji of
several characters, combining marks, code, and tokens that are never to be split.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

SCRIPTS = (
    (0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x530, 0x58F),
    (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F), (0x980, 0x9FF), (0xB80, 0xBFF), (0xE00, 0xE7F),
    (0xE80, 0xEFF), (0x1000, 0x109F), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1200, 0x137F),
    (0x1780, 0x17FF), (0x1E00, 0x1EFF), (0x2000, 0x206F), (0x2070, 0x209F), (0x20A0, 0x20CF),
    (0x2100, 0x214F), (0x2150, 0x218F), (0x2190, 0x22FF), (0x2460, 0x24FF), (0x2500, 0x26FF),
    (0x3000, 0x303F), (0x3040, 0x30FF), (0x3100, 0x312F), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
    (0xE000, 0xE0FF), (0xFB00, 0xFB4F), (0xFF00, 0xFFEF), (0x10400, 0x1044F), (0x1D400, 0x1D7FF),
    (0x1F300, 0x1F64F), (0x20000, 0x2A6DF),
)  # fmt: skip
SPACES = (
    " ", "  ", "   ", "    ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\t\t", "\n\n\n\n", " " * 8,
    " \t ", "\u3000", "\u00a0", "\u2028", "\x0b", "\x0c", "\x85", "\u200b", "\u200d", " " * 17,
    "\r",
)  # fmt: skip
EMOJI = ("😀", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "👍🏽", "❤️", "🫠", "1️⃣")
WORDS = (
    "the", "of", "I'm", "you'LL", "we've", "DON'T", "it's", "they'd", "Hello", "camelCaseWord",
    "snake_case_word", "HTTPServer", "iPhone", "naïve", "café", "Straße", "ΑΒΓ", "привет", "мир",
    "你好", "世界", "こんにちは", "カタカナ", "한국어", "สวัสดี", "नमस्ते", "مرحبا", "שלום", "‘quoted’",
    "“x”", "…", "—", "http://example.com/a?b=c&d=1", "user@host.com", "C++", ".NET", "f(x):",
    "#include <stdio.h>", "x**2", "for(int i=0;i<10;++i){a[i]+=b[i];}", "__name__=='__main__'",
    "</s>", "<s>", "<unk>", '<div class="x">', "```python", "$x_{i}^{2}$", "\\frac{1}{2}", "▁",
    "Ġ", "<0x0A>", "[PAD5]", "ſ", "'S", "K", "e\u0301", "ǅ", "ⅷ", "²", "½", "١٢٣", "१२३",
)  # fmt: skip
SIGNS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"


def hard_texts(count: int, special: Sequence[str] = (), seed: int = 0) -> list[str]:
    """As many texts, the first of them empty. `special`: tokens that some contain."""
    random = Random(seed)
    texts = (
        "".join(_piece(random, special) for _ in range(random.randrange(1, 20)))
        for _ in range(count - 1)
    )
    return ["", *texts]


def _piece(random: Random, special: Sequence[str]) -> str:
    first, last = random.choice(SCRIPTS)
    pieces = (
        random.choice(WORDS),
        f" {random.choice(WORDS)}",
        random.choice(SPACES),
        str(random.randrange(10 ** random.randrange(1, 14))),
        random.choice(EMOJI),
        random.choice(special or WORDS),
        "".join(random.choices(SIGNS, k=random.randrange(1, 6))),
        "".join(chr(random.randint(first, last)) for _ in range(random.randrange(1, 8))),
    )
    return random.choices(pieces, (22, 8, 20, 8, 7, 7, 8, 20))[0]
