"""What peers.py measures, and the best that could be.

    format      bf16, 8-bit, 4-bit: our folder and llama.cpp's file; GGUF: the same file
    scenario    how a process begins, its memory limit, the prompts it gets
    system      ours, ours exact, llama.cpp

A bound is what must be read over the rate of reading it, or for prompts what must be multiplied
over the rate of matrix products if that is longer. All rates are of the same run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from peers_cell import Prompt

from moe_infinity import OffloadConfig
from moe_infinity.cli.inspection import inspect_checkpoint

LENGTHS = (32, 128, 600, 2000)  # of prompts, in tokens
NUM_DECODED = 40
NUM_SEQUENCES = 8
# The first of them leaves every expert in memory; those after it are warm.
WARM = (
    Prompt(1, 2000, 0),
    Prompt(1, 32, NUM_DECODED),
    Prompt(1, 128, 0),
    Prompt(1, 600, NUM_DECODED),
    Prompt(1, 2000, 0),
    Prompt(NUM_SEQUENCES, 32, NUM_DECODED),
)
OURS, EXACT, LLAMA_CPP = "ours", "ours, exact", "llama.cpp"
START_S, SLOWDOWN = 10.0, 3.0  # of the estimate: of a process, and of its bounds


class Format(NamedTuple):
    name: str
    packed: str | None  # what `moe-infinity pack --experts` takes
    gguf: str | None  # llama.cpp's name of the type
    is_same_file: bool = False  # ours reads llama.cpp's file

    def folder(self, model: Path) -> Path:
        """What ours reads."""
        if self.is_same_file:
            return self.file(model)
        return model.with_name(f"{model.name}-{self.packed}") if self.packed else model

    def file(self, model: Path) -> Path:
        return model.with_name(
            f"{model.name}-{self.gguf}.gguf" if self.gguf else f"{model.name}.gguf"
        )


FORMATS = (
    Format("bf16", None, None), Format("8-bit", "int8", "q8_0"), Format("4-bit", "int4", "q4_0"),
    Format("GGUF bf16", None, None, True), Format("GGUF Q8_0", None, "q8_0", True),
    Format("GGUF Q4_K", None, "q4_k_m", True),
)  # fmt: skip


class Scenario(NamedTuple):
    name: str
    prompts: tuple[Prompt, ...]
    is_cached: bool = False  # the files were read once before; else they are on disk only
    limit: str | None = None  # of memory, page cache included


def scenarios(limits: list[str]) -> Iterator[Scenario]:
    for length in LENGTHS:
        yield Scenario(f"cold {length}", (Prompt(1, length, 0),))
    for length in LENGTHS[:-1]:
        num_decoded = NUM_DECODED if length == LENGTHS[0] else 0
        yield Scenario(f"cached {length}", (Prompt(1, length, num_decoded),), is_cached=True)
    yield Scenario("warm", WARM, is_cached=True)
    for limit in limits:
        yield Scenario(f"limit {limit}", (Prompt(1, 32, NUM_DECODED),), limit=limit)


def num_ids() -> int:
    """Token ids that the longest process needs."""
    return max(
        sum(prompt.num_sequences * (prompt.num_tokens + prompt.num_decoded) for prompt in prompts)
        for _, prompts, *_ in scenarios([])
    )


def systems_of(scenario: Scenario, form: Format) -> dict[str, dict[str, Any]]:
    """Our options by name; llama.cpp has none."""
    if form.is_same_file:
        return {OURS: {}, LLAMA_CPP: {}}
    systems: dict[str, dict[str, Any]] = {OURS: {}, EXACT: exact_options(), LLAMA_CPP: {}}
    if scenario.limit:
        other = not OffloadConfig().prefetch
        systems[prefetch_name(other)] = {"prefetch": other}
    return systems


def exact_options() -> dict[str, Any]:
    """What gives the bits of transformers."""
    if "exact" in {field.name for field in fields(OffloadConfig)}:
        return {"exact": True}
    return {"experts_implementation": "grouped_mm"}


def prefetch_name(is_on: bool) -> str:
    return f"ours, prefetch {'on' if is_on else 'off'}"


def key_of(form: Format, scenario: Scenario, system: str) -> str:
    """The name of a cell in the file of results."""
    return f"{form.name} {scenario.name} | {system}"


@dataclass(frozen=True)
class Sizes:
    """Bytes of one system's files in one format."""

    dense: int  # all that is no routed expert
    embedding: int  # the part of it of which a token needs one row
    expert: int  # one of one layer
    num_experts: int  # of all layers

    @property
    def total(self) -> int:
        return self.dense + self.num_experts * self.expert

    def needed(self, num_activated: float) -> float:
        """Bytes a step reads whose layers activate so many experts, added up."""
        return self.dense - self.embedding + num_activated * self.expert


def sizes_of_ours(model: Path, form: Format, config: dict[str, Any]) -> Sizes:
    config_from = str(model) if form.is_same_file else None
    summary = inspect_checkpoint(str(form.folder(model)), config_from=config_from)
    return Sizes(
        dense=summary.dense_bytes,
        embedding=2 * config["vocab_size"] * config["hidden_size"],  # stays bfloat16
        expert=summary.expert_bytes // (summary.moe_layers * summary.experts_per_layer),
        num_experts=summary.moe_layers * summary.experts_per_layer,
    )


def sizes_of_gguf(file: Path, config: dict[str, Any]) -> Sizes:
    from gguf import GGUFReader

    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(file).tensors}
    experts = sum(size for name, size in sizes.items() if "_exps." in name)
    num_experts = config["num_hidden_layers"] * config["num_experts"]
    return Sizes(
        dense=sum(sizes.values()) - experts,
        embedding=sizes["token_embd.weight"],
        expert=experts // num_experts,
        num_experts=num_experts,
    )


def flops(config: dict[str, Any], num_tokens: int) -> float:
    """Of a prompt: products with the weights of every token, attention, logits of the last."""
    hidden, head = config["hidden_size"], config["head_dim"]
    query = config["num_attention_heads"] * head
    kv = config["num_key_value_heads"] * head
    experts = 3 * config["num_experts_per_tok"] * config["moe_intermediate_size"]
    weights = hidden * (2 * query + 2 * kv + config["num_experts"] + experts)
    attention = query * num_tokens  # queries and values, half of them masked
    layers = config["num_hidden_layers"] * num_tokens * (weights + attention)
    return 2.0 * (layers + config["vocab_size"] * hidden)


@dataclass(frozen=True)
class Rates:
    """Of one run: bytes per second, and floating-point operations per second."""

    disk_random: float
    disk_sequential: float
    memory: float
    products_bf16: float
    products_float32: float

    @property
    def disk(self) -> float:
        return max(self.disk_random, self.disk_sequential)

    @property
    def products(self) -> float:
        return max(self.products_bf16, self.products_float32)


def estimated_s(scenario: Scenario, sizes: Sizes, config: dict[str, Any], rates: Rates) -> float:
    """About how long a process takes, before one of its kind has run."""
    top_k = config["num_hidden_layers"] * config["num_experts_per_tok"]
    seconds = sizes.total / rates.disk
    step_s = sizes.needed(top_k) / (rates.disk_random if scenario.limit else rates.memory)
    for prompt in scenario.prompts:
        operations = prompt.num_sequences * flops(config, prompt.num_tokens)
        seconds += operations / min(rates.products_bf16, rates.products_float32)
        seconds += prompt.num_decoded * min(prompt.num_sequences, 4) * step_s
    return START_S + SLOWDOWN * seconds
