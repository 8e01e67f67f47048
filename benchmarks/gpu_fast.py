"""The rows of gpu_check.py about steps that the device decides (experts_implementation="fast"), as
`generate()` gives them with a StaticCache: sampling and all of transformers' loop included.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_models import Shape, token_ids
from gpu_routing import forget_graphs, replaying
from gpu_rows import (
    CAPS_GB,
    PROMPT,
    TOKENS,
    WARM_UP,
    expert_bytes,
    request_of,
    routing_of,
    tokens_of,
    warm_every_expert,
)
from gpu_stage import Check
from torch import Tensor

from moe_infinity import MoE
from moe_infinity.cuda import graphed_step
from moe_infinity.cuda.device_steps import DeviceSteps
from moe_infinity.cuda.reports import ReportPoller
from moe_infinity.cuda.slot_kernels import SlotWork, slot_kernels

FAST: dict[str, Any] = {"experts_implementation": "fast"}


def fast_correctness(check: Check, folder: Path) -> None:
    """With and without a graph the tokens of the run with all experts on the device and no graph,
    whatever the budgets; and whether there was a graph.
    """
    ids = token_ids(256, 48)
    with check.model(folder, device_memory="100%", cuda_graph=False, **FAST) as moe:
        expected = tokens_of(moe, ids, check.num_checked)
    for device_memory, host_memory in (("3%", "40%"), ("25%", "100%"), ("60%", "40%")):
        budgets = {"device_memory": device_memory, "host_memory": host_memory}
        with check.model(folder, **budgets, **FAST) as moe:
            warm_every_expert(check, moe)
            found = [tokens_of(moe, ids, check.num_checked) for _ in range(2)]
            moe.check_invariants()
            has_graph = moe.has_cuda_graph
        check.add("same tokens", found == [expected] * 2, experts="fast", **budgets)
        check.add("captured", has_graph, **budgets)


class Clock:
    """Given to generate() as a streamer: when each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is left to do."""

    @property
    def token_ms(self) -> float:
        """Median, of what comes after a warm-up."""
        pairs = zip(self.times[WARM_UP + 2 :], self.times[WARM_UP + 1 :], strict=False)
        return 1e3 * statistics.median(later - earlier for later, earlier in pairs)


def token_ms(check: Check, moe: MoE, shape: Shape, *, seed: int = 1) -> tuple[float, list[int]]:
    """Milliseconds of a token, and all of them."""
    clock = Clock()
    ids = token_ids(shape.config.vocab_size, PROMPT, seed=seed)
    num_tokens = WARM_UP + TOKENS
    options: dict[str, Any] = {"streamer": clock, "min_new_tokens": num_tokens}
    with replaying(moe, request_of(check, shape, seed), check.device):
        tokens = tokens_of(moe, ids, num_tokens, **options)
    return clock.token_ms, tokens


def steps_of(moe: MoE) -> DeviceSteps:
    steps = moe.engine.device_steps
    assert steps is not None
    return steps


@contextmanager
def known_pointers(moe: MoE) -> Iterator[None]:
    """The same graph without resolve and fill: every expert is in a slot, and which is known."""
    layers, table = steps_of(moe).layers, steps_of(moe).table
    address_LE = table.address_S[table.slot_LE.long()]

    def compute(moe_layer_idx: int, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        mlp = layers.mlps[moe_layer_idx]
        work = SlotWork(layers.kernels, mlp, x_TD, index_TK, weights_TK)
        work.compute(address_LE[moe_layer_idx])
        return work.sum()

    forget_graphs(moe)
    with mock.patch.object(layers, "compute", compute):
        yield
    forget_graphs(moe)


def not_polled() -> AbstractContextManager[Any]:
    """The host applies the reports of a step when the next one is launched."""

    return mock.patch.object(ReportPoller, "poll_reports", ReportPoller.catch_up)


def fast_resident(check: Check, folder: Path, shape: Shape) -> None:
    """All hits: what it costs to find the experts, what the graph is worth, and what the host does
    in each step.
    """
    conditions: dict[str, Any] = {"shape": shape.name, "layers": shape.layers}
    with check.model(folder, device_memory="100%", **FAST) as moe:
        warm_every_expert(check, moe)
        token_ms(check, moe, shape)
        host_ms: list[float] = []
        with (
            timed(ReportPoller, "apply_report", host_ms),
            timed(ReportPoller, "upload_scores", host_ms),
        ):
            hit_ms, check.found.resident_tokens[shape.name] = token_ms(check, moe, shape)
        hit_rate, captured = moe.report().decode.hit_rate, str(moe.has_cuda_graph)
        with known_pointers(moe):
            ceiling_ms, _ = token_ms(check, moe, shape)
        check.add(
            "fast path, all hits", hit_ms, "ms", ceiling=ceiling_ms, hit_rate=hit_rate,
            captured=captured, **conditions,
        )  # fmt: skip
        check.add("host, while a step runs", sum(host_ms) / (WARM_UP + TOKENS), "ms", **conditions)
        kernels_agree(check, moe, shape)
    with (
        mock.patch.object(graphed_step, "WARM_UP_STEPS", 1 << 30),
        check.model(folder, device_memory="100%", **FAST) as moe,
    ):
        warm_every_expert(check, moe)
        without_ms, tokens = token_ms(check, moe, shape)
        check.add("fast path, all hits, no graph", without_ms, "ms", **conditions)
        is_same = tokens == check.found.resident_tokens[shape.name]
        check.add("same tokens", is_same, shape=shape.name, graph="none")


@contextmanager
def timed(owner: Any, name: str, into_ms: list[float]) -> Iterator[None]:
    function = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            into_ms.append(1e3 * (time.perf_counter() - started))

    with mock.patch.object(owner, name, run):
        yield


def kernels_agree(check: Check, moe: MoE, shape: Shape) -> None:
    """One MoE layer by the device's kernel and by its reference on the CPU, from HOST. Both sum in
    float32.
    """
    layers, host = steps_of(moe).layers, moe.engine.tiers[-1]
    keys = [key for key in moe.engine.bookkeeping.keys[0] if host.table.lookup(key) is not None]
    keys = keys[: shape.config.num_experts_per_tok]
    x_TD = torch.randn(1, shape.config.hidden_size).bfloat16()
    weights_TK = torch.rand(1, len(keys))
    pointers_E = torch.tensor([host.slots.address_of(host.table.slot_of(key)) for key in keys])
    given = x_TD, torch.arange(len(keys))[None], weights_TK
    plain = SlotWork(slot_kernels(torch.device("cpu")), layers.mlps[0], *given)
    plain.compute(pointers_E)
    expected = plain.sum()
    work = SlotWork(layers.kernels, layers.mlps[0], *(t.to(check.device) for t in given))
    work.compute(pointers_E.to(check.device))
    found = work.sum().cpu()
    error = (found - expected).abs().max() / expected.abs().max()
    check.add("experts as their reference", bool(error <= torch.finfo(torch.bfloat16).eps))
    check.add("experts, largest difference", float(error), "of max", shape=shape.name)


def fast_capped(check: Check, folder: Path, shape: Shape) -> None:
    """Decode with the share of experts that a smaller device would hold, beside the time that the
    missed experts take on the link; then without evictions, so that no missed expert gets a slot.
    """
    for cap in CAPS_GB:
        if cap >= shape.total_gb:
            continue
        share = f"{100 * cap / shape.total_gb:.1f}%"
        with check.model(folder, device_memory=share, **FAST) as moe:
            warm_every_expert(check, moe)
            for seed in range(2, 5):
                token_ms(check, moe, shape, seed=seed)
            for way in ("fill", "not polled", "through the link"):
                with forgetting(moe), not_polled() if way == "not polled" else nullcontext():
                    token_ms(check, moe, shape, seed=4)
                    if way == "through the link":  # the prompt takes the free slots
                        evict_nothing(steps_of(moe))
                    measure_misses(check, moe, shape, f"{cap} GB, {way}", share)


@contextmanager
def forgetting(moe: MoE) -> Iterator[None]:
    """The predictor forgets what was requested inside: measured again, the same request is as new
    to it as before.
    """
    predictor = moe.engine.predictor
    assert predictor is not None
    known = copy.deepcopy(vars(predictor))
    yield
    vars(predictor).update(known)


def evict_nothing(steps: DeviceSteps) -> None:
    table = steps.table
    forever = np.full(table.scores_LHE.shape, np.inf)
    steps.poller.upload_scores = lambda moe_layer_idx=None: table.upload_scores(forever)  # type: ignore[method-assign]


@contextmanager
def counting_reports(into: list[bool]) -> Iterator[None]:
    """For each poll while a step runs, whether the host applied a report."""
    apply_next = ReportPoller._apply_next

    def counted(*args: Any) -> bool:
        into.append(apply_next(*args))
        return into[-1]

    with mock.patch.object(ReportPoller, "_apply_next", counted):
        yield


def measure_misses(check: Check, moe: MoE, shape: Shape, name: str, share: str) -> None:
    before, polls = moe.report().decode, list[bool]()
    with counting_reports(polls):
        took_ms, tokens = token_ms(check, moe, shape)
    after = moe.report().decode
    num_layers = (after.steps - before.steps) * len(moe.engine.bookkeeping.keys)
    misses = (after.misses - before.misses) / (after.steps - before.steps)
    copied_mb = misses * expert_bytes(moe) / 1e6
    check.add(
        f"fast path, {name}", took_ms, "ms", shape=shape.name,
        ceiling=check.link_ms(copied_mb), layers=shape.layers, routing=routing_of(check, shape),
        copied_mb_per_token=copied_mb, device_memory=share, captured=str(moe.has_cuda_graph),
        reports_applied_in_time=sum(polls) / num_layers,
        hit_rate=(after.hits - before.hits) / (after.lookups - before.lookups),
    )  # fmt: skip
    if shape.name in check.found.resident_tokens:
        is_same = tokens == check.found.resident_tokens[shape.name]
        check.add("same tokens", is_same, shape=shape.name, budget=name)


def fast_machinery(check: Check) -> None:
    """Kernel by kernel (gpu_kernels.py): resolve and fill, and their share of a layer."""
    if check.is_fake:
        check.add("kernels alone", "left out: no GPU")
        return
    from gpu_kernels import Sizes, measure

    found = measure(Sizes(), rounds=7)
    check.add("machinery per layer, captured", found["machinery_us"], "us", ceiling=10.0)
    check.add("resolve, for each miss", found["resolve_miss_us"], "us")
    for name in ("resident", "layer", "fill_one", "fill_all", "through"):
        check.add(f"kernels, {name}", found[f"{name}_share"], "share", ceiling=1.0)


def fast_packed(check: Check) -> None:
    """Experts of every packed kind from device memory."""
    if check.is_fake:
        check.add("kernels of packed weights", "left out: no GPU")
        return
    from gpu_kernels import KINDS, Layers, Sizes, ceilings, time_resident

    read_gbps = ceilings(rounds=5)["read_gbps"]
    for kind in KINDS[1:]:
        found = time_resident(Layers(Sizes(kind=kind)), 5, read_gbps)
        check.add(f"kernels, resident, {kind}", found["resident_share"], "share", ceiling=1.0)
