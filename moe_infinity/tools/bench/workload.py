"""What every model is asked, by the names that users of llama-bench know.

pp128          a prompt of 128 tokens, computed at once
tg64 @ d128    64 tokens decoded one by one, after a prompt of 128
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moe_infinity.errors import ConfigError

WARM_UP = -1  # the repeat that is not counted


class BenchTest(NamedTuple):
    """One line of the table."""

    num_prompt: int
    num_decoded: int  # 0: what is measured is the prompt

    @property
    def name(self) -> str:
        if self.num_decoded:
            return f"tg{self.num_decoded} @ d{self.num_prompt}"
        return f"pp{self.num_prompt}"

    @property
    def meaning(self) -> str:
        if self.num_decoded:
            return f"{self.num_decoded:,} tokens decoded one by one, after {self.num_prompt:,}"
        return f"a prompt of {self.num_prompt:,} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts of each length; after the shortest one tokens are decoded. Their ids are given, so
    that every model computes the same ones.
    """

    lengths: tuple[int, ...]
    num_decoded: int
    repeats: int
    vocab_size: int
    text_ids: Sequence[int] = ()  # read in circles; empty: ids drawn at random

    @classmethod
    def from_text(
        cls, lengths: str, *, num_decoded: int, repeats: int, vocab_size: int, ids: Sequence[int]
    ) -> Workload:
        """With lengths such as "128,600". Raises ConfigError."""
        return cls(
            lengths=tuple(dict.fromkeys(map(_length, lengths.split(",")))),
            num_decoded=num_decoded,
            repeats=repeats,
            vocab_size=vocab_size,
            text_ids=ids,
        )

    @property
    def num_positions(self) -> int:
        """Tokens of the longest text."""
        return max(max(self.lengths), min(self.lengths) + self.num_decoded)

    def tests(self) -> Iterator[BenchTest]:
        """The prompts, and decoding."""
        yield from (BenchTest(length, 0) for length in self.lengths)
        if self.num_decoded:
            yield BenchTest(min(self.lengths), self.num_decoded)

    def texts(self, repeat: int) -> Iterator[tuple[int, list[int]]]:
        """For each prompt its length, and the ids of it and of what is decoded after it."""
        for length in self.lengths:
            num_decoded = self.num_decoded if length == min(self.lengths) else 0
            yield length, self._ids(length + num_decoded, f"{repeat} {length}")

    def _ids(self, num_ids: int, seed: str) -> list[int]:
        """The same for the same seed, on every machine."""
        chance = random.Random(seed)
        if not self.text_ids:
            return [chance.randrange(self.vocab_size) for _ in range(num_ids)]
        start = chance.randrange(len(self.text_ids))
        return [self.text_ids[at % len(self.text_ids)] for at in range(start, start + num_ids)]


def _length(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(
            f"--prompt: {text!r} is no number of tokens above 0\nhint: as in --prompt 128,600"
        )
    return int(text)
