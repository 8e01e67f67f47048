"""How long tokens take as generate() and the server give them, sampling included; and what bounds
them: reading weights from the GPU's memory, multiplying with them, or copying missed experts.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import statistics
import time
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import transformers
from gpu_models import Shape, sizes_of, token_ids
from gpu_stage import LINK, LOCKING, MEMORY, PRODUCT, Bound, Check
from gpu_traces import Replay, requests_of
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from moe_infinity import MoE
from moe_infinity.report import Report

PROMPT = 64
PROFILED = 4  # steps
# Parts of the names of kernels. The first kind counts that has one.
KINDS = {
    "find and copy experts": ("_resolve", "_fill"),
    "experts": ("_up", "_down", "_sum", "_plan"),
    "attention": ("attend", "_combine", "fmha", "flash"),
    "norms, positions, activations": ("norm", "_make_heads", "_gated"),
    "router": ("_choose",),
    "matrix products": ("gemm", "gemv", "cutlass", "nvjet", "splitK"),
    "copies": ("Memcpy", "Memset", "copy"),
}


class Clock:
    """Given to generate() as a streamer: when each token was there, which is when all kernels
    before it are over. Profiles some steps if it is told how.
    """

    def __init__(self, check: Check, profiler: Any = None) -> None:
        self._warm_up, self._profiler = check.warm_up, profiler
        self.times = [time.perf_counter()]

    def put(self, value: Tensor) -> None:
        """The prompt, and then each token."""
        self.times.append(time.perf_counter())
        step = len(self.times) - 2 - self._warm_up
        if self._profiler is not None and step == 0:
            self._profiler.start()
        if self._profiler is not None and step == PROFILED:
            self._profiler.stop()

    def end(self) -> None:
        """Nothing is left to do."""

    @property
    def first_ms(self) -> float:
        return 1e3 * (self.times[2] - self.times[0])

    @property
    def token_ms(self) -> float:
        """Median, of what comes after a warm-up."""
        times = self.times[self._warm_up + 2 :]
        return 1e3 * statistics.median(b - a for a, b in zip(times, times[1:], strict=False))


def generate(model: Any, ids: Tensor, num: int, clock: Clock | None = None, **more: Any) -> str:
    """So many tokens, in short."""
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num, min_new_tokens=num,
        do_sample=False, pad_token_id=0, streamer=clock, **more,
    )  # fmt: skip
    return f"{zlib.crc32(out.cpu().numpy().tobytes()):08x}"


def warm_up(check: Check, moe: MoE) -> None:
    """A prompt of all kinds of tokens, so that experts come in."""
    length = 256 if check.is_fake else 4096
    generate(moe, torch.randint(0, moe.model.config.vocab_size, (1, length)), 1)


@dataclass(frozen=True)
class Used:
    """What a step uses, on average."""

    tokens: float
    share: float  # of all experts, that it asks for
    copied_bytes: float
    hit_rate: float

    @staticmethod
    def between(before: Report, after: Report, phase: str) -> Used:
        old, new = getattr(before, phase), getattr(after, phase)
        steps, lookups, hits = new.steps - old.steps, new.lookups - old.lookups, new.hits - old.hits
        copies = lookups - hits
        if phase == "decode":
            copies += after.prefetches.begun - before.prefetches.begun
        slots, everything = after.tiers[0], after.tiers[-1]
        copied_bytes = copies / steps * slots.capacity_bytes / slots.capacity
        tokens, share = (new.tokens - old.tokens) / steps, lookups / steps / everything.experts
        return Used(tokens, share, copied_bytes, hits / lookups)


def bound_of(check: Check, folder: Path, shape: Shape, used: Used) -> Bound:
    """Of a step. Attention is left out, and the last product: a prompt has one row of it, and its
    weights are as many as the embedding's.
    """
    sizes = sizes_of(folder)
    of_token = sizes["experts"] * shape.active_share + sizes["rest"] - sizes["embedding"]
    flops = used.tokens * of_token  # weights of two bytes, two operations for each
    return max(
        check.takes(sizes["rest"] + used.share * sizes["experts"], by=MEMORY),
        check.takes(used.copied_bytes, by=LINK),
        Bound(PRODUCT, flops / check.value(PRODUCT) / 1e9),
        key=lambda bound: bound.value,
    )


def measure(
    check: Check, folder: Path, shape: Shape, *, way: str, carried: Path | None = None,
    requests: Sequence[tuple[int, int]] = ((1, PROMPT),), is_cold: bool = False,
    is_profiled: bool = False, **options: Any,
) -> None:  # fmt: skip
    """Requests, each so many sequences of so many tokens, by a model with these options. Of four
    the last counts; of a new process the first two. All ways of one arithmetic have to give the
    same tokens.
    """
    started = time.perf_counter()
    arithmetic = "exact" if options.get("exact") else options.get("gpu_engine", "graphs")
    with check.model(folder, is_filled=not is_cold, **options) as moe:
        told: dict[str, Any] = {"model": shape.name, "layers": shape.layers, "way": way}
        told["arithmetic"] = arithmetic
        opened_ms = 1e3 * (time.perf_counter() - started)
        locked = check.takes(moe.report().tiers[1].capacity_bytes, by=LOCKING)
        check.add("open", opened_ms, "ms", locked, **told)
        if not is_cold:
            warm_up(check, moe)
        replay = Replay(moe, None if carried is None else requests_of(carried, shape))
        for batch, length in requests:
            told |= {"batch": batch, "prompt": length, "routing": replay.kind}
            for seed in (1, 1) if is_cold else (2, 3, 4, 1):
                replay.begin(seed)
                ids = token_ids(shape.config.vocab_size, batch, length, seed=seed)
                clock, before = Clock(check), moe.report()
                tokens = generate(moe, ids, check.num_tokens, clock)
                prompt, step = (
                    Used.between(before, moe.report(), phase) for phase in ("prefill", "decode")
                )
                if is_cold or seed == 1:
                    bound = bound_of(check, folder, shape, prompt)
                    check.add("first token", clock.first_ms, "ms", bound, **told)
                    bound = bound_of(check, folder, shape, step)
                    add_token(check, moe, clock.token_ms, bound, step, told)
            compare(check, tokens, told)
        if is_profiled:
            add_kernels(check, moe, folder, ids, step.share, told)
            add_functions(check, moe, ids, told)
        moe.check_invariants()


def add_token(
    check: Check, moe: MoE, ms: float, bound: Bound, used: Used, told: dict[str, Any]
) -> None:
    check.add(
        "token", ms, "ms", bound, **told, tokens_per_s=1e3 * told["batch"] / ms,
        hit_rate=used.hit_rate, copied_mb=used.copied_bytes / 1e6,
        captured=str(check.has_graph(moe)),
    )  # fmt: skip


def compare(check: Check, tokens: str, told: dict[str, Any]) -> None:
    """With those of the same request by the first way that was measured."""
    request = {key: value for key, value in told.items() if key != "way"}
    expected = check.value("tokens", **request)
    if expected is None:
        check.add("tokens", tokens, **request)
    else:
        check.add("same tokens", tokens == expected, **told)


def kind_of(kernel: str) -> str:
    kinds = (kind for kind, parts in KINDS.items() if any(part in kernel for part in parts))
    return next(kinds, "others")


def add_kernels(
    check: Check, moe: MoE, folder: Path, ids: Tensor, share: float, told: dict[str, Any]
) -> None:
    """Those of a step: how many, and how long they take."""
    kind = "CPU" if check.is_fake else "CUDA"
    profiler = profile(activities=[getattr(ProfilerActivity, kind)])
    generate(moe, ids, check.num_tokens, Clock(check, profiler))
    us_by_kind, us_by_name = defaultdict[str, list[float]](list), defaultdict[str, float](float)
    for event in profiler.events() or ():
        if event.device_type == getattr(DeviceType, kind):
            for name in (kind_of(event.name), "all"):
                us_by_kind[name].append(event.time_range.elapsed_us())
            us_by_name[event.name[:60]] += event.time_range.elapsed_us() / PROFILED
    experts, rest = share * sizes_of(folder)["experts"], sizes_of(folder)["rest"]
    read_bytes = {"experts": experts, "matrix products": rest, "all": experts + rest}
    for name, us in us_by_kind.items():
        ms = check.takes(read_bytes.get(name, 0), by=MEMORY).value
        nodes, bound = len(us) / PROFILED, Bound(MEMORY, 1e3 * ms)
        check.add(f"kernels: {name}", sum(us) / PROFILED, "us", bound, nodes=nodes, **told)
    most = sorted(us_by_name.items(), key=itemgetter(1), reverse=True)[:12]
    check.add("kernels that take most", json.dumps(dict(most)), **told)


def add_functions(check: Check, moe: MoE, ids: Tensor, told: dict[str, Any]) -> None:
    """Milliseconds a token of the Python functions that take most themselves, under a profiler,
    which makes all of them slower.
    """
    profiler = cProfile.Profile()
    profiler.enable()
    generate(moe, ids, check.num_tokens)
    profiler.disable()
    found = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    own_s = {
        f"{Path(file).name}:{line} {name}": s for (file, line, name), (_, _, s, *_) in found.items()
    }
    most = sorted(own_s.items(), key=itemgetter(1), reverse=True)[:24]
    ms = {name: round(1e3 * s / check.num_tokens, 3) for name, s in most}
    check.add("functions that take most", json.dumps(ms), **told)


def measure_stock(
    check: Check, folder: Path, shape: Shape, *, way: str, share: float = 1.0,
    requests: Sequence[tuple[int, int]] = ((1, PROMPT),), **options: Any,
) -> None:  # fmt: skip
    """transformers alone, with these options of generate(); with a share of the experts on the GPU
    by accelerate.
    """
    told: dict[str, Any] = {"model": shape.name, "layers": shape.layers, "way": way}
    if share < 1.0 and (check.is_fake or find_spec("accelerate") is None):
        check.add("token", "left out: needs accelerate and a GPU", **told)
        return
    sizes = sizes_of(folder)
    loading: dict[str, Any] = {}
    if share < 1.0:
        on_gpu = int(share * sizes["experts"] + sizes["rest"] + sizes["embedding"])
        loading = {"device_map": "auto", "max_memory": {0: on_gpu, "cpu": int(100e9)}}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="grouped_mm", **loading
    )
    if not loading:
        model.to(check.device)
    for batch, length in requests:
        told |= {"batch": batch, "prompt": length}
        ids = token_ids(shape.config.vocab_size, batch, length, seed=1).to(check.device)
        for _ in range(2):  # the first one compiles
            clock = Clock(check)
            generate(model, ids, check.num_tokens, clock, **options)
        told_by_time = ("first token", clock.first_ms), ("token", clock.token_ms)
        for name, ms in told_by_time:
            tokens = batch * (length if name == "first token" else 1)
            used_share = 1 - (1 - shape.active_share) ** tokens  # as if routing were random
            used = Used(tokens, used_share, (1 - share) * sizes["experts"], share)
            check.add(name, ms, "ms", bound_of(check, folder, shape, used), **told)


class WithoutText:
    """Random token ids stand for no text."""

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def convert_ids_to_tokens(self, token_id: int) -> str:
        return ""


def measure_server(
    check: Check, folder: Path, shape: Shape, *, batches: Sequence[int], **options: Any
) -> None:
    """Sequences that decode together, by the engine of the server, without HTTP."""
    from moe_infinity.server.config import ServeConfig
    from moe_infinity.server.engine import Engine
    from moe_infinity.server.sampling import Sampling
    from moe_infinity.server.sequences import Request

    greedy = Sampling(temperature=0.0)
    with check.model(folder, **options) as moe:
        vars(moe)["tokenizer"] = WithoutText()
        warm_up(check, moe)
        for batch in batches:
            engine = Engine(moe, ServeConfig(max_batch=batch, prefix_cache="off"))
            for seed in (1, 2):  # the first warms up
                for ids in token_ids(shape.config.vocab_size, batch, PROMPT, seed=seed).tolist():
                    most = check.num_tokens + batch  # they begin one after the other
                    request = Request(prompt_ids=ids, max_new_tokens=most, sampling=greedy)
                    engine.submit([engine.running(request, lambda _: None)])
                before, steps_s = moe.report(), list[float]()
                while any(engine.state()[kind] for kind in ("waiting", "prefilling", "decoding")):
                    is_full = engine.state()["decoding"] == batch
                    started = time.perf_counter()
                    engine.step()
                    steps_s += [time.perf_counter() - started] if is_full else []
            used = Used.between(before, moe.report(), "decode")
            told = {"model": shape.name, "layers": shape.layers, "way": "server", "batch": batch}
            bound = bound_of(check, folder, shape, used)
            add_token(check, moe, 1e3 * statistics.median(steps_s), bound, used, told)
