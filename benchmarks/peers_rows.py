"""The rows of the report of peers.py: values, ratios to llama.cpp, and bounds, from its results."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from peers_plan import LENGTHS, LLAMA_CPP, OURS, WARM, Rates, Sizes, flops

RATES = {
    "disk_random": ("disk, random reads as large as an expert, GB/s", 1e9),
    "disk_sequential": ("disk, in file order, GB/s", 1e9),
    "memory": ("memory, read by all cores, GB/s", 1e9),
    "products_bf16": ("matrix product of torch, bf16, GFLOP/s", 1e9),
    "products_float32": ("matrix product of torch, float32, GFLOP/s", 1e9),
}


class Row(NamedTuple):
    """One line of a format's table."""

    title: str
    scenario: str  # of the process
    prompt: int | None  # which of its prompts; None: loading
    part: str  # "load", "first" (loading and prompt), "prompt" or "decode"

    @property
    def is_rate(self) -> bool:
        return self.part == "decode"

    def value(self, result: dict[str, Any]) -> float:
        if self.prompt is None:
            return float(result["load_s"])
        prompt = result["prompts"][self.prompt]
        if self.part == "decode":
            return float(prompt["decode"]["tok_per_s"])
        return float(prompt["s"] + (result["load_s"] if self.part == "first" else 0))


def rows(limits: list[str]) -> Iterator[Row]:
    yield Row("load, cached, s", f"cached {LENGTHS[0]}", None, "load")
    for start, length in ((start, length) for start in ("cold", "cached") for length in LENGTHS):
        is_of_warm = start == "cached" and length == WARM[0].num_tokens
        scenario = "warm" if is_of_warm else f"{start} {length}"
        yield Row(f"first token, {start}, {length:,} tokens, s", scenario, 0, "first")
    for prompt_idx, prompt in enumerate(WARM[1:], start=1):
        if prompt.num_sequences == 1:
            title = f"prompt, warm, {prompt.num_tokens:,} tokens, s"
            yield Row(title, "warm", prompt_idx, "prompt")
    yield Row("decode, first prompt, 32 tokens, tok/s", "cached 32", 0, "decode")
    for prompt_idx, prompt in enumerate(WARM):
        if prompt.num_decoded:
            after = f"{prompt.num_tokens} tokens"
            if prompt.num_sequences > 1:
                after = f"{prompt.num_sequences} sequences"
            yield Row(f"decode, warm, {after}, tok/s", "warm", prompt_idx, "decode")
    for limit in limits:
        yield Row(f"decode, limit {limit}, tok/s", f"limit {limit}", 0, "decode")


@dataclass(frozen=True)
class Found:
    """The results of a run."""

    results: dict[str, Any]

    @property
    def rates(self) -> Rates:
        rates = self.results["rates"]
        return Rates(**{name: median(each[name] for each in rates) for name in rates[0]})

    def rates_by_title(self) -> dict[str, list[float]]:
        """Of every part of the run, in the units of their titles."""
        scaled = {title: (name, unit) for name, (title, unit) in RATES.items()}
        return {
            title: [each[name] / unit for each in self.results["rates"]]
            for title, (name, unit) in scaled.items()
        }

    @property
    def limits(self) -> list[str]:
        names = re.findall(r" limit (\S+) \|", "\n".join(self.results["cells"]))
        return list(dict.fromkeys(names))

    def cell(self, form: str, scenario: str, system: str) -> list[dict[str, Any]]:
        """What its processes printed, by round."""
        found: list[dict[str, Any]] = self.results["cells"].get(f"{form} {scenario} | {system}", [])
        return found

    def all_of(self, system: str) -> list[dict[str, Any]]:
        """What all processes of a system printed, without what failed."""
        cells = self.results["cells"].items()
        found = [each for key, cell in cells if key.endswith(f"| {system}") for each in cell]
        return [each for each in found if "failed" not in each]

    def values(self, form: str, row: Row, system: str) -> dict[int, float]:
        """By round, without what failed."""
        found = enumerate(self.cell(form, row.scenario, system))
        return {at: row.value(result) for at, result in found if "failed" not in result}

    def ratios(self, form: str, row: Row, system: str, other: str = LLAMA_CPP) -> list[float]:
        """How many times as fast as the other system, in each round that has both."""
        ours, theirs = (self.values(form, row, name) for name in (system, other))
        both = sorted(ours.keys() & theirs.keys())
        if row.is_rate:
            return [ours[at] / theirs[at] for at in both]
        return [theirs[at] / ours[at] for at in both]

    def bound(self, form: str, row: Row, system: str) -> float | None:
        """The best value possible, in the unit of the row; None if nobody counted what it needs."""
        is_theirs = system == LLAMA_CPP
        sizes = Sizes(**self.results["sizes"][form][LLAMA_CPP if is_theirs else OURS])
        if row.prompt is None:  # mapping a file reads nothing
            return None if is_theirs else sizes.dense / self.rates.memory
        if row.scenario.startswith("limit"):
            read = self._median(form, row, system, lambda step: step["read_bytes"])
            return self.rates.disk_random / read if read else None
        activated = self._median(form, row, OURS, lambda step: step["activated"])
        if activated is None:
            return None
        prompt = WARM[row.prompt] if row.scenario == "warm" else None
        if row.is_rate:
            num_sequences = prompt.num_sequences if prompt else 1
            return num_sequences * self.rates.memory / sizes.needed(activated)
        num_tokens = prompt.num_tokens if prompt else int(row.scenario.split()[1])
        read_from = self.rates.disk if row.scenario.startswith("cold") else self.rates.memory
        operations = flops(self.results["about"]["config"], num_tokens)
        return max(sizes.needed(activated) / read_from, operations / self.rates.products)

    def _median(
        self, form: str, row: Row, system: str, of: Callable[[dict[str, Any]], float]
    ) -> float | None:
        """Of a step's count, over the rounds."""
        found = [each for each in self.cell(form, row.scenario, system) if "failed" not in each]
        prompts = [each["prompts"][row.prompt] for each in found]
        steps = [prompt["decode"] if row.is_rate else prompt for prompt in prompts]
        return median(map(of, steps)) if steps else None
