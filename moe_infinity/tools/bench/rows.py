"""Measurements as rows of a table: medians with their spread, and the best that could be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from moe_infinity.sizes import format_bytes
from moe_infinity.tools.bench.measuring import BenchTest, Measured, Needs, Sample


class Rates(NamedTuple):
    """Measured on this machine; None: not measured."""

    memory: float | None  # bytes per second that all cores read together
    disk: float | None  # bytes per second of random reads
    products: float | None  # floating-point operations per second of matrix products

    def best(self, other: Rates) -> Rates:
        """The faster ones: what else ran may have slowed down either."""
        pairs = zip(self, other, strict=True)
        return Rates(*(max(filter(None, pair), default=None) for pair in pairs))


@dataclass(frozen=True, slots=True)
class Row:
    """One test of one model."""

    test: BenchTest
    model: str  # the budget
    samples: Sequence[Sample]
    bound: float | None  # tokens per second

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each repeat."""
        return list(map(_rate, self.samples))

    @property
    def hit_rate(self) -> float | None:
        lookups = sum(sample.lookups for sample in self.samples)
        return sum(sample.hits for sample in self.samples) / lookups if lookups else None

    @property
    def share_of_bound(self) -> float | None:
        return None if self.bound is None else median(self.rates) / self.bound

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {
            "test": self.test.name,
            "meaning": self.test.meaning,
            "host_memory": self.model,
            "tokens_per_s": median(self.rates),
            "tokens_per_s_min": min(self.rates),
            "tokens_per_s_max": max(self.rates),
            "hit_rate": self.hit_rate,
            "bytes_read_per_token": per_token(self.samples, "bytes_read"),
            "disk_bytes_per_token": per_token(self.samples, "disk_bytes"),
            "bound_tokens_per_s": self.bound,
            "share_of_bound": self.share_of_bound,
            "samples": [sample._asdict() for sample in self.samples],
        }

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        rates = self.rates
        return [
            self.test.name,
            self.model,
            _number(median(rates)),
            f"{_number(min(rates))} - {_number(max(rates))}",
            _percent(self.hit_rate),
            format_bytes(per_token(self.samples, "bytes_read")),
            "-" if self.bound is None else _number(self.bound),
            _percent(self.share_of_bound),
        ]


HEADINGS = (
    "test", "host memory", "tokens/s", "min - max", "hit rate", "read/token", "bound", "of bound",
)  # fmt: skip


def per_token(samples: Sequence[Sample], field: str) -> float:
    """The mean of a count over the tokens of all samples."""
    total: float = sum(getattr(sample, field) for sample in samples)
    return total / sum(sample.num_tokens for sample in samples)


def bound_of(
    test: BenchTest, samples: Sequence[Sample], needs: Needs, rates: Rates
) -> float | None:
    """Tokens per second that no program could exceed here with the misses that there were; None:
    nothing is known that limits it.

    A decoded token reads the dense weights and its experts once. A prompt multiplies with them.
    What missed comes from the disk meanwhile.
    """
    seconds = []
    if rates.disk is not None:
        seconds.append(per_token(samples, "disk_bytes") / rates.disk)
    if test.num_decoded and rates.memory is not None:
        experts = per_token(samples, "lookups") * needs.expert_bytes
        seconds.append((needs.dense_bytes + experts) / rates.memory)
    if not test.num_decoded and rates.products is not None and needs.prompt_flops is not None:
        seconds.append(needs.prompt_flops / rates.products)
    slowest = max(seconds, default=0.0)
    return 1 / slowest if slowest else None


def rows_of(found: Mapping[str, Measured], rates: Rates) -> list[Row]:
    """Rows by test, prompts first, then by model."""
    tests = sorted({test for measured in found.values() for test in measured.samples}, key=_place)
    return [_row(test, model, found, rates) for test in tests for model in found]


def _place(test: BenchTest) -> tuple[int, int]:
    return test.num_decoded, test.num_prompt


def _row(test: BenchTest, model: str, found: Mapping[str, Measured], rates: Rates) -> Row:
    samples = found[model].samples[test]
    needs = found[model].needs
    bound = None if needs is None else bound_of(test, samples, needs, rates)
    return Row(test, model, samples, bound)


def _rate(sample: Sample) -> float:
    return sample.num_tokens / sample.seconds


def table_of(rows: Sequence[Row]) -> str:
    """Markdown, and what its words mean."""
    lines = [list(HEADINGS), *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [
        " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    ]
    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    meanings = dict.fromkeys(f"{row.test.name}: {row.test.meaning}" for row in rows)
    table = [f"| {padded[0]} |", f"|{rule}|", *(f"| {line} |" for line in padded[1:])]
    return "\n".join([*table, "", *meanings])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
