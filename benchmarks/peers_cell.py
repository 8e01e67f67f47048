"""One process of peers.py: load a model, feed it texts, print what that took as JSON.

Texts are token ids, so nobody samples: a prompt is fed at once, the tokens after it one by one.
Only the standard library is imported before the runner is known. So the interpreter that has
llama_cpp needs no torch.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import platform
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

# Where llama_cpp is installed, this package may not be.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from moe_infinity.tools.bench.llama_process import LlamaCpp


class Prompt(NamedTuple):
    num_sequences: int  # of different text, in one forward pass
    num_tokens: int  # of each sequence, fed at once
    num_decoded: int  # steps after it, one token of each sequence


class Runner(Protocol):
    """A loaded model; `package` is imported before the time of loading begins."""

    package: str

    def begin(self, num_sequences: int) -> None:
        """Forget the texts so far."""

    def feed(self, ids_BT: list[list[int]]) -> None:
        """Compute the next tokens of each sequence, and the logits of its last one."""

    def num_activated(self) -> int | None:
        """Experts activated so far, added up over layers and steps; None if nobody counts them."""

    def about(self) -> str:
        """Versions, and what the arithmetic was built for."""

    def close(self) -> None:
        """End what it began."""


class Ours:
    package = "moe_infinity.model"

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from moe_infinity import MoE

        self._moe = MoE(model, **options)
        gc.freeze()  # as commands do

    def begin(self, num_sequences: int) -> None:
        from transformers import DynamicCache

        from moe_infinity.architectures.cache_argument import cache_parameter

        cache = DynamicCache(config=self._moe.model.config)
        self._cached = {cache_parameter(self._moe.model.forward): cache}

    def feed(self, ids_BT: list[list[int]]) -> None:
        import torch

        with torch.no_grad():
            self._moe.model(
                torch.tensor(ids_BT),
                **self._cached,
                use_cache=True,
                logits_to_keep=1,
            )

    def report(self) -> Any:
        return self._moe.report()

    def num_activated(self) -> int | None:
        report = self.report()
        return report.prefill.lookups + report.decode.lookups

    def about(self) -> str:
        import torch
        import transformers

        built_for = torch.backends.cpu.get_cpu_capability()
        return (
            f"experts {self._moe.report().experts}; torch {torch.__version__} "
            f"({built_for}, {torch.get_num_threads()} threads), "
            f"transformers {transformers.__version__}, Python {platform.python_version()}"
        )

    def close(self) -> None:
        self._moe.close()


class Theirs(LlamaCpp):
    package = "llama_cpp"

    def num_activated(self) -> int | None:
        return None


RUNNERS: dict[str, type[Ours] | type[Theirs]] = {"ours": Ours, "llama.cpp": Theirs}


def bytes_from_disk() -> int:
    """What this process has read from the disk, page faults included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def run_prompt(runner: Runner, prompt: Prompt, ids: Iterator[int]) -> dict[str, Any]:
    """The time of a prompt, and of the steps after it."""
    length = prompt.num_tokens + prompt.num_decoded
    text_BT = [list(islice(ids, length)) for _ in range(prompt.num_sequences)]
    runner.begin(prompt.num_sequences)
    counts = [(bytes_from_disk(), runner.num_activated())]
    times = [time.perf_counter()]
    at = 0
    for num_tokens, num_steps in ((prompt.num_tokens, 1), (1, prompt.num_decoded)):
        for _ in range(num_steps):
            runner.feed([ids_T[at : at + num_tokens] for ids_T in text_BT])
            at += num_tokens
        times.append(time.perf_counter())
        counts.append((bytes_from_disk(), runner.num_activated()))
    result: dict[str, Any] = {"s": times[1] - times[0], **difference(counts[0], counts[1], 1)}
    if prompt.num_decoded:
        result["decode"] = {
            "tok_per_s": prompt.num_sequences * prompt.num_decoded / (times[2] - times[1]),
            **difference(counts[1], counts[2], prompt.num_decoded),
        }
    return result


Counts = tuple[int, "int | None"]


def difference(before: Counts, after: Counts, num_steps: int) -> dict[str, Any]:
    """Bytes read from the disk and experts activated, for each step."""
    found: dict[str, Any] = {"read_bytes": (after[0] - before[0]) / num_steps}
    if before[1] is not None and after[1] is not None:
        found["activated"] = (after[1] - before[1]) / num_steps
    return found


def run_cell(
    runner: str, options: dict[str, Any], prompts: list[list[int]], ids: list[int]
) -> dict[str, Any]:
    """Loading, then each prompt with text of its own. What one leaves in memory serves the next."""
    kind = RUNNERS[runner]
    importlib.import_module(kind.package)
    started = time.perf_counter()
    loaded: Runner = kind(**options)
    load_s = time.perf_counter() - started
    rest = iter(ids)
    found = [run_prompt(loaded, Prompt(*prompt), rest) for prompt in prompts]
    result = {"load_s": load_s, "prompts": found, "about": loaded.about()}
    loaded.close()
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One process of peers.py")
    parser.add_argument("--cell", type=json.loads, required=True)
    print(json.dumps(run_cell(**parser.parse_args().cell)))
