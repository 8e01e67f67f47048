"""How fast a model runs on a machine, as sums that a reader can check.

    decode    overhead + dense weights + activated experts + misses from the disk
              with a GPU, of the last two and the copies to it the longest
    prompt    the longer of (products and reading of weights, experts from the disk)

Experts that are in memory compute while others are read (engine/layer.py). In a step they save
little: reads take the cores' time, too, and the last expert of a layer computes alone. So both
count. Not counted: prefetch, which is used where it pays, and what the page cache has of the files.
All constants are in `Constants`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from moe_infinity.tools.planning.fit import Fit, ModelSizes
from moe_infinity.tools.planning.hit_rates import HitRate
from moe_infinity.tools.planning.machine import PlanMachine


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Costs that are neither sizes nor rates of the machine. Seconds were measured on two cores."""

    # Python beside the kernels: 2.3 ms a step of 7 layers, all resident (docs/performance.md,
    # "Where the time goes"); 4.4 to 5.6 ms where each layer may have to wait (notes/log.md,
    # "Python took").
    resident_layer_s: float = 0.0023 / 7
    waiting_layer_s: float = 0.0050 / 7
    # Of the memory's rate, what kernels reach: 17.2 of 18.4 ms (the same place).
    memory_share: float = 0.93
    # transformers, kernels from their cache, beside reading dense weights: 1.1 s ("Where we are
    # slower"), and 2 s on two Zen 3 cores.
    load_s: float = 1.5
    # Of the measured rate of products, what prompts reach: of 600 tokens 0.9 of 1.07 s (row
    # "prompt, warm, 600 tokens", rate of 38 rows in kernels/many_rows.py).
    products_share: float = 0.85
    # Of the disk's measured rate, what loads reach: those of a layer come in bursts, and copying
    # them takes the cores' time. 0.5 to 1 under memory limits (notes/log.md, "three memory
    # limits").
    disk_share: float = 0.7
    # Launching a layer's kernels where the host decides: 0.25 to 0.31 ms on an H200.
    gpu_layer_s: float = 0.0003


@dataclass(frozen=True, slots=True)
class Term:
    """Bytes, or operations, over a rate; or seconds that are neither."""

    what: str
    amount: float
    rate: float  # 0: `amount` is seconds

    @property
    def seconds(self) -> float:
        return self.amount / self.rate if self.rate else self.amount

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"seconds": self.seconds}


@dataclass(frozen=True, slots=True)
class Time:
    """Terms that follow each other, and lanes that go on at once, of which the longest counts."""

    after_each_other: tuple[Term, ...]
    at_once: tuple[tuple[Term, ...], ...]

    @property
    def lane(self) -> tuple[Term, ...]:
        """The longest of those that go on at once."""
        return max(self.at_once, key=_seconds_of, default=())

    @property
    def seconds(self) -> float:
        return _seconds_of(self.after_each_other) + _seconds_of(self.lane)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "seconds": self.seconds,
            "after_each_other": [term.as_dict() for term in self.after_each_other],
            "at_once": [[term.as_dict() for term in lane] for lane in self.at_once],
        }


def _seconds_of(terms: tuple[Term, ...]) -> float:
    return sum(term.seconds for term in terms)


@dataclass(frozen=True, slots=True)
class Speed:
    """The expected times of one sequence."""

    decode: Time  # one token
    first_token_cold: Time  # of a process that has just begun to load the model
    first_token_warm: Time  # of a later prompt of that process

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.decode.seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokens_per_s": self.tokens_per_s,
            "decode": self.decode.as_dict(),
            "first_token_cold": self.first_token_cold.as_dict(),
            "first_token_warm": self.first_token_warm.as_dict(),
        }


def speed(
    sizes: ModelSizes,
    machine: PlanMachine,
    fit: Fit,
    hits: tuple[HitRate, ...],  # of the tiers with slots, the one that computes first
    *,
    prompt: int,
    constants: Constants,
) -> Speed:
    """After a prompt of so many tokens."""
    return Speed(
        decode=_decode(sizes, machine, fit, hits, constants),
        first_token_cold=_prompt(sizes, machine, fit, prompt, constants, is_cold=True),
        first_token_warm=_prompt(sizes, machine, fit, prompt, constants, is_cold=False),
    )


def _decode(
    sizes: ModelSizes,
    machine: PlanMachine,
    fit: Fit,
    hits: tuple[HitRate, ...],
    constants: Constants,
) -> Time:
    activated = sizes.num_layers * sizes.top_k
    on_gpu = fit.gpu is not None
    memory = machine.gpu_memory if on_gpu else machine.memory * constants.memory_share
    layer_s = constants.resident_layer_s if fit.all_in_memory else constants.waiting_layer_s
    if on_gpu:
        layer_s = constants.gpu_layer_s
    misses = activated * (1 - hits[-1].decode)
    before = (
        Term(f"Python, {sizes.num_layers} MoE layers", sizes.num_layers * layer_s, 0),
        Term("dense weights", sizes.step_dense_bytes, memory),
    )
    experts = Term("activated experts", activated * sizes.slot_bytes, memory)
    copies = activated * (1 - hits[0].decode)  # to the GPU; without one they are the misses
    read = _read(machine, min(misses, copies) * sizes.stored_bytes, constants)
    if not on_gpu:
        return Time((*before, experts, *read), ())
    copied = Term("experts copied to the GPU", copies * sizes.slot_bytes, machine.link)
    return Time(before, tuple(filter(None, ((experts,), (copied,), read))))


def _read(machine: PlanMachine, num_bytes: float, constants: Constants) -> tuple[Term, ...]:
    """Nothing, if there is nothing to read."""
    disk = machine.disk * constants.disk_share
    return (Term("experts read from the disk", num_bytes, disk),) if num_bytes else ()


def activated_share(sizes: ModelSizes, num_tokens: int) -> float:
    """Return the share of a layer's experts that a prompt activates if all are equally likely."""
    return 1 - (1 - sizes.top_k / sizes.num_experts) ** num_tokens


def prompt_operations(sizes: ModelSizes, num_tokens: int) -> float:
    """Products of all tokens with the weights they use, and of the last one with the head."""
    experts = sizes.num_layers * sizes.top_k * sizes.expert_params
    return 2.0 * (num_tokens * (sizes.dense_params + experts) + sizes.head_params)


def _prompt(
    sizes: ModelSizes,
    machine: PlanMachine,
    fit: Fit,
    num_tokens: int,
    constants: Constants,
    *,
    is_cold: bool,
) -> Time:
    activated = activated_share(sizes, num_tokens) * sizes.total_experts
    in_host = fit.host.num_slots / sizes.total_experts
    read = activated * (1.0 if is_cold else 1 - in_host) * sizes.stored_bytes
    lanes: list[tuple[Term, ...]] = [
        (
            Term(
                f"products of {num_tokens} tokens",
                prompt_operations(sizes, num_tokens),
                machine.products * constants.products_share,
            ),
            Term(
                "weights read from memory",
                sizes.step_dense_bytes + activated * sizes.slot_bytes,
                machine.memory * constants.memory_share,
            ),
        )
    ]
    if fit.gpu is not None:  # it multiplies faster than the link brings experts
        at_gpu = fit.gpu.num_slots / sizes.total_experts
        copied = activated * (1.0 if is_cold else 1 - at_gpu) * sizes.slot_bytes
        read_there = sizes.step_dense_bytes + activated * sizes.slot_bytes
        lanes = [
            (Term("experts copied to the GPU", copied, machine.link),),
            (Term("weights read by the GPU", read_there, machine.gpu_memory),),
        ]
    lanes.append(_read(machine, read, constants))
    before: tuple[Term, ...] = ()
    if is_cold:
        filled = min(activated, fit.host.num_slots) * sizes.slot_bytes
        before = (
            Term("loading the model", constants.load_s, 0),
            Term("dense weights from the disk", fit.tiers[0].dense, machine.disk),
            Term("new memory for experts", filled, machine.new_memory),
        )
    return Time(before, tuple(filter(None, lanes)))
