"""A plan as a page for people, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from moe_infinity.sizes import format_bytes
from moe_infinity.tools.planning.fit import TierBytes
from moe_infinity.tools.planning.machine import PlanMachine
from moe_infinity.tools.planning.planner import Outlook, RunPlan, disk_bytes
from moe_infinity.tools.planning.speed import Term, Time

COLUMNS = 100
NAMES = {"gpu": "GPU", "host": "host memory", "disk": "disk"}
ONE_GPU = "Figures of a GPU were compared with one kind of GPU, layer by layer (docs/gpu.md)."


def page(plan: RunPlan) -> str:
    """Does it fit, where, how fast, what else, and what to type."""
    parts = [_model(plan), _machine(plan.machine), _fits(plan), _tiers(plan)]
    if plan.outlook.fit.refusal is None:
        parts += [_hits(plan.outlook), _speed(plan)]
    if plan.variants:
        parts.append(_variants(plan))
    if plan.commands:
        parts.append(["To run it:", *(f"  {command}" for command in plan.commands)])
    return "\n\n".join("\n".join(lines) for lines in parts)


def _model(plan: RunPlan) -> list[str]:
    sizes = plan.sizes
    where = ", not on this machine: only headers were read" if sizes.folder is None else ""
    count = sizes.activated_params
    params = f"{count / 1e9:.2f} billion" if count >= 1e8 else f"{count / 1e6:.1f} million"
    by_row = f", {format_bytes(sizes.row_bytes)} of them by row" if sizes.row_bytes else ""
    return [
        f"{sizes.model}: {sizes.architecture}{where}",
        f"  {sizes.num_layers} MoE layers of {sizes.num_experts} experts, {sizes.top_k} a token; "
        f"one expert {format_bytes(sizes.slot_bytes)}, all {format_bytes(sizes.expert_bytes)}",
        f"  dense weights {format_bytes(sizes.dense_bytes)}{by_row}; a token uses {params} "
        f"parameters; {format_bytes(disk_bytes(sizes))} on disk",
    ]


def _machine(machine: PlanMachine) -> list[str]:
    def said(name: str, text: str) -> str:
        return f"{text} (assumed)" if name in machine.assumed else text

    lines = [
        f"Machine: {said('cores', f'{machine.cores} cores')}, "
        f"{said('ram', format_bytes(machine.ram) + ' of memory free')}, "
        f"{said('memory', _rate(machine.memory) + ' memory')}",
        f"  {said('disk', _rate(machine.disk) + ' random reads of the disk')}, "
        f"{said('products', f'{machine.products / 1e9:.0f} GFLOP/s')}, "
        f"{said('new_memory', _rate(machine.new_memory) + ' new memory')}",
    ]
    if machine.gpu:
        lines.append(
            f"  {machine.gpu_name} with {format_bytes(machine.gpu)} free, "
            f"{said('gpu_memory', _rate(machine.gpu_memory))}, "
            f"{said('link', _rate(machine.link) + ' to it')}"
        )
        if machine.lockable < machine.ram:
            lines.append(
                f"  warning: {format_bytes(machine.lockable)} may be page-locked; what is more "
                "goes through staging buffers, slowly"
            )
            lines.append("  hint: raise `ulimit -l`")
    return lines


def _fits(plan: RunPlan) -> list[str]:
    fit = plan.outlook.fit
    if fit.refusal is not None:
        return wrap(f"It does not fit: {fit.refusal}.", COLUMNS)
    if fit.all_in_memory:
        return ["It fits: all experts in memory."]
    share = fit.host.num_slots / plan.sizes.total_experts
    return [f"It runs with {share:.0%} of the experts in memory, the rest on disk."]


def _tiers(plan: RunPlan) -> list[str]:
    lines = [
        f"{'':<12}{'has':>11}{'dense':>11}{'experts':>11}{'of all':>8}{'KV cache':>11}"
        f"{'programs':>11}{'left':>11}"
    ]
    for tier in plan.outlook.fit.tiers:
        lines.append(_tier_line(tier, plan.sizes.total_experts))
    lines.append(f"KV cache: room for {plan.planned.context:,} tokens. Programs: Python and torch.")
    if plan.sizes.kv.dtype != "auto":
        lines.append(f"Keys and values: {plan.sizes.kv}.")
    return lines


def _tier_line(tier: TierBytes, total: int) -> str:
    def size(num_bytes: float) -> str:
        return format_bytes(num_bytes) if num_bytes else "-"

    left = "-" if tier.name == "disk" else format_bytes(max(tier.left, 0))
    cells = [
        size(tier.available),
        size(tier.dense),
        size(tier.experts),
        size(tier.kv),
        size(tier.runtime),
        left,
    ]
    share = f"{tier.num_slots / total:.0%}"
    row = [*cells[:3], share, *cells[3:]]
    widths = (11, 11, 11, 8, 11, 11, 11)
    texts = "".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
    return f"{NAMES[tier.name]:<12}{texts}"


def _hits(outlook: Outlook) -> list[str]:
    tiers = [tier for tier in outlook.fit.tiers if tier.name != "disk"]
    return [
        f"Expected hit rate, {NAMES[tier.name]}: {hit.decode:.0%} ({hit.source})"
        for tier, hit in zip(tiers, outlook.hits, strict=True)
    ]


def _speed(plan: RunPlan) -> list[str]:
    speed = plan.outlook.speed
    times = {
        f"Decoding: {_count(speed.tokens_per_s)} tokens/s, each": speed.decode,
        f"First token after a cold start ({plan.planned.prompt} tokens)": speed.first_token_cold,
        "First token of a later prompt of that length": speed.first_token_warm,
    }
    lines = []
    for title, time in times.items():
        lines += [f"{title}: {_seconds(time.seconds)}", *_arithmetic(time)]
    if plan.outlook.fit.gpu is not None:
        lines.append(ONE_GPU)
    return lines


def _arithmetic(time: Time) -> Iterator[str]:
    for term in time.after_each_other:
        yield f"  + {_term(term)}"
    for lane in time.at_once:
        is_only = len(time.at_once) == 1
        sign = "+" if is_only or lane is time.lane else " "
        for term in lane:
            yield f"  {sign} {_term(term)}" + ("" if sign == "+" else "  (meanwhile)")


def _term(term: Term) -> str:
    if not term.rate:
        return f"{term.what:<34}{'':>30}{_seconds(term.seconds):>12}"
    if term.what.startswith("products"):
        sum_text = f"{term.amount / 1e9:,.0f} GFLOP / {term.rate / 1e9:,.0f} GFLOP/s"
    else:
        sum_text = f"{term.amount / 1e9:,.3f} GB / {_rate(term.rate)}"
    return f"{term.what:<34}{sum_text:>30}{_seconds(term.seconds):>12}"


def _variants(plan: RunPlan) -> list[str]:
    lines = [
        f"{'In fewer bits':<36}{'on disk':>11}{'in memory':>11}{'hit rate':>10}{'tokens/s':>10}"
        f"{'first token':>13}"
    ]
    rows = [("as it is", plan.sizes, plan.outlook)]
    rows += [(variant.name, variant.sizes, variant.outlook) for variant in plan.variants]
    for name, sizes, outlook in rows:
        share = outlook.fit.host.num_slots / sizes.total_experts
        head = f"{name:<36}{disk_bytes(sizes) / 1e9:>8.1f} GB{share:>11.0%}"
        if outlook.fit.refusal is not None:
            lines.append(f"{head}  does not fit")
            continue
        lines.append(
            f"{head}{outlook.hits[0].decode:>10.0%}{_count(outlook.speed.tokens_per_s):>10}"
            f"{_seconds(outlook.speed.first_token_cold.seconds):>13}"
        )
    lines.append("Fewer bits change results. Same arithmetic at other bytes; GGUF files come from")
    lines.append("the hub, or from llama.cpp's converter.")
    return lines


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _count(rate: float) -> str:
    return f"{rate:.2f}" if rate < 10 else f"{rate:.0f}"
