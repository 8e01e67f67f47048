"""What the three commands of gpu_check.py do, in this order: what decides comes first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from gpu_correct import GRAPHS, HOST, machine, near_exact, run_tests, same_tokens
from gpu_measure import PROMPT, measure, measure_server, measure_stock
from gpu_models import Shape, deepseek_v2_lite, gpt_oss, qwen3
from gpu_stage import MEMORY, Bound, Check, Stage

MACHINE = Stage("machine", 15, machine)
QWEN3 = Shape("qwen3-30b-a3b", qwen3, layers=8, full_layers=48, total_gb=58.0)
DEEPSEEK = Shape("deepseek-v2-lite", deepseek_v2_lite, layers=13, full_layers=26, total_gb=28.8)
GPT_OSS = Shape("gpt-oss-20b", gpt_oss, layers=24, full_layers=24, total_gb=10.2)
SHAPES = QWEN3, DEEPSEEK, GPT_OSS
TESTS = {  # pytest's arguments, and how long they may take
    "tests of the default path": (["tests/engine/test_gpu.py", "-m", "gpu", "-n", "8"], 120),
    "tests of the kernel of experts": (["tests/kernels/triton", "-m", "triton", "-n", "12"], 90),
}
TESTS_OF_GRAPHS = {
    "graphs, tests of host and device": (
        ["tests/gpu/test_device_protocol.py", "-m", "gpu"],
        60,
    ),
    "graphs, tests of tiny models": (
        ["tests/gpu/test_gpu.py", "-m", "gpu", "-n", "8"],
        60,
    ),
    "graphs, tests of kernels": (["tests/gpu", "-m", "triton", "-n", "12"], 180),
}
ALL: dict[str, Any] = {"device_memory": "100%"}
BATCHES, PROMPTS = (2, 4, 8, 16), (128, 2048, 8192)
DECIDES: dict[str, dict[str, Any]] = {  # who, and why
    "host": HOST,
    "host, which prefetches": {"prefetch": True, **HOST},
    "device": GRAPHS,
}


def correct(carried: Path, *, is_fake: bool) -> list[Stage]:
    """Are copies, kernels and tokens right? Of the default path first."""
    tests, tests_of_graphs = (
        [Stage(n, s, partial(run_tests, args=args)) for n, (args, s) in of.items()]
        for of in (TESTS, TESTS_OF_GRAPHS)
    )
    tiny = [replace(shape, layers=3, is_tiny=True) for shape in SHAPES]
    wide = [replace(shape, layers=2, is_tiny=is_fake) for shape in SHAPES]
    (tokens, logits), (tokens_of_host, logits_of_host) = (
        [partial(run, **engine) for run in (same_tokens, near_exact)] for engine in (GRAPHS, HOST)
    )
    return [
        MACHINE,
        tests[0],
        *(Stage(f"tokens of tiny {shape.name}", 30, tokens_of_host, shape) for shape in tiny),
        *(Stage(f"logits of {shape.name}", 30, logits_of_host, shape) for shape in wide),
        *tests[1:],
        tests_of_graphs[0],
        *(Stage(f"graphs, tokens of tiny {shape.name}", 30, tokens, shape) for shape in tiny),
        *(Stage(f"graphs, logits of {shape.name}", 30, logits, shape) for shape in wide),
        *tests_of_graphs[1:],
    ]


def time(carried: Path, *, is_fake: bool) -> list[Stage]:
    """Where does the time of a token go, with all experts on the GPU? Two depths tell what a layer
    takes, and what a token takes beside its layers.
    """
    few, many = (
        replace(QWEN3, layers=layers, is_tiny=is_fake)
        for layers in ((2, 4) if is_fake else (8, 24))
    )
    requests = [(batch, PROMPT) for batch in BATCHES] + [(1, length) for length in PROMPTS]
    if is_fake:
        requests = [(3, PROMPT), (1, 128)]
    profiled = partial(measure, way="host", is_profiled=True, **ALL, **HOST)
    more = partial(measure, way="host, other requests", requests=requests, **ALL, **HOST)
    by_torch = partial(measure, way="exact", exact=True, **ALL)
    graphs = partial(measure, way="graphs", is_profiled=True, **ALL, **GRAPHS)
    more_graphs = partial(measure, way="graphs, other requests", requests=requests, **ALL, **GRAPHS)
    stock = partial(measure_stock, way="transformers", requests=[(1, PROMPT), *requests])
    static = partial(measure_stock, way="transformers, compiled", cache_implementation="static")
    return [
        MACHINE,
        Stage("24 layers", 70, profiled, many),
        Stage("8 layers", 40, profiled, few),
        Stage("8 layers by transformers", 25, stock, few),
        Stage("24 layers by transformers", 40, stock, many),
        Stage("batches and prompts", 60, more, few),
        Stage("8 layers, exact", 35, by_torch, few),
        Stage("24 layers by graphs", 70, graphs, many),
        Stage("8 layers by graphs", 40, graphs, few),
        Stage("batches and prompts by graphs", 60, more_graphs, few),
        Stage("8 layers by transformers, compiled", 90, static, few),
        Stage("24 layers by transformers, compiled", 120, static, many),
        Stage("a layer", 1, slopes),
    ]


def slopes(check: Check) -> None:
    """Milliseconds of a layer, of a token beside its layers, and so of all layers of the model."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in check.rows():
        if row["name"] == "token" and row["batch"] == 1:
            found.setdefault(row["way"], []).append(row)
    for way, rows in found.items():
        few, many = (end(rows, key=itemgetter("layers")) for end in (min, max))
        num_more = many["layers"] - few["layers"]
        if num_more == 0:
            continue
        layer, bound = ((many[key] - few[key]) / num_more for key in ("value", "bound"))
        check.add("a layer", layer, "ms", Bound(MEMORY, bound), way=way)
        for name, num_layers in (("no layers", 0), ("48 layers", QWEN3.full_layers)):
            more = num_layers - few["layers"]
            least = Bound(MEMORY, few["bound"] + more * bound)
            check.add(
                f"token, by these, of {name}", few["value"] + more * layer, "ms", least, way=way
            )


def offloaded(carried: Path, *, is_fake: bool) -> list[Stage]:
    """How near is it to what the link allows? Budgets are the shares of all experts that 8, 12 and
    24 GB are of the whole model. Half of the layers, or fewer, are built of models above 11 GB.
    """
    shapes = [DEEPSEEK, GPT_OSS, replace(QWEN3, layers=12)]
    if is_fake:
        shapes = [replace(shape, layers=3, is_tiny=True) for shape in shapes]
    stages = [MACHINE]

    def add(what: str, needs_s: float, run: Callable[..., None], *of: Shape) -> None:
        stages.extend(Stage(f"{shape.name}, {what}", needs_s, run, shape) for shape in of)

    add(
        "all resident",
        25,
        partial(measure, way="all resident", carried=carried, **ALL, **GRAPHS),
        *shapes,
    )
    for cap in (8, 12, 24):
        for who, options in DECIDES.items():
            way = f"{cap} GB, {who}"
            for shape in shapes:
                share = cap / shape.total_gb
                if share < 1 and (cap == 8 or who in ("host", "device")):
                    given = {**options, "device_memory": f"{share:.1%}"}
                    add(way, 25, partial(measure, way=way, carried=carried, **given), shape)
    first, share = shapes[0], 8 / shapes[0].total_gb
    memory = {"device_memory": f"{share:.1%}"}
    add("cold", 30, partial(measure, way="8 GB, cold", is_cold=True, **memory), first)
    batches = (1, 3) if is_fake else (1, 8, 16)
    add("served", 45, partial(measure_server, batches=batches, **memory), first)
    add("by accelerate", 45, partial(measure_stock, way="8 GB, accelerate", share=share), first)
    return stages


PLANS = {"correct": correct, "time": time, "offloaded": offloaded}
