"""Puts an engine together: everything a part needs comes through its constructor."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moe_infinity.architectures.early_router import EarlyRouter
from moe_infinity.architectures.prompt_blocks import PromptBlocks
from moe_infinity.cache.policies import ACTIVATION_AWARE, make_policy
from moe_infinity.checkpoint.expert_loader import ExpertLoader
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.config import OffloadConfig
from moe_infinity.engine.bookkeeping import Bookkeeping
from moe_infinity.engine.compute import LayerComputer
from moe_infinity.engine.engine import LocalExperts
from moe_infinity.engine.kernel_trial import use_kernel
from moe_infinity.engine.layer import LayerPath
from moe_infinity.engine.preloader import Preloader
from moe_infinity.experts import ExpertKey
from moe_infinity.memory.device import DeviceSlots
from moe_infinity.memory.mover import Mover
from moe_infinity.memory.room import FIXED_SHARE, ProcessMemory, Room
from moe_infinity.memory.slots import MappedSlots
from moe_infinity.memory.tiers import make_tiers
from moe_infinity.predict.planner import PayOff, Prefetcher
from moe_infinity.predict.predictor import Predictor
from moe_infinity.system import linux

logger = logging.getLogger(__name__)


def build_experts(
    plan: Plan,
    reader: Reader,
    config: OffloadConfig,
    *,
    device_slots: DeviceSlots | None = None,  # None: experts compute on the CPU
    early_router: EarlyRouter | None = None,
    local_LE: NDArray[np.bool_] | None = None,  # which experts are computed here; None: all
    blocks: PromptBlocks | None = None,  # of long prompts in a layer; None: they are not cut
) -> LocalExperts:
    """Build the experts of this process. Raises ConfigError for budgets that do not fit."""
    loader = ExpertLoader(plan.recipes, reader, [layer.num_experts for layer in plan.layers])
    memory = ProcessMemory(config.memory_bytes, in_page_cache=plan.dense_in_page_cache)
    is_here = device_slots is None
    free_bytes = free_for_experts(memory, plan, config, computes_here=is_here)
    in_blocks = device_slots is None and not config.is_exact  # if experts are copied to slots
    slot_bytes = [
        recipes.slot_bytes(layer.num_experts, in_blocks=in_blocks)
        for layer, recipes in zip(plan.layers, plan.recipes, strict=True)
    ]
    bookkeeping = _bookkeeping(plan, loader, config, device_slots, slot_bytes, local_LE, free_bytes)
    is_mapped = isinstance(bookkeeping.tiers[-1].slots, MappedSlots)
    if in_blocks and not is_mapped:
        loader.lie_in_blocks()
    path = _layer_path(plan, config, bookkeeping, early_router)
    ways = " or ".join(sorted({computer.how for computer in path.computers}))
    where = ", in the page cache" if is_mapped else ""
    stored = {  # tied experts once
        id(recipes): layer.num_experts * recipes.bytes_per_expert()
        for layer, recipes in zip(plan.layers, plan.recipes, strict=True)
    }
    room = Room(
        memory,
        plan.step_bytes(config.kv_dtype, config.is_exact) if is_here else None,
        bookkeeping.tiers[-1],
        num_experts=bookkeeping.total_experts if local_LE is None else int(local_LE.sum()),
        num_layers=len(plan.layers),
        blocks=blocks,
    )
    return LocalExperts(
        path=path,
        room=room,
        blocks=blocks,
        bookkeeping=bookkeeping,
        loader=loader,
        preloader=Preloader(bookkeeping, loader.in_file_order, loader.present),
        description=f"{plan.packing or 'as stored'}, {ways}{where}",
        stored_expert_bytes=sum(stored.values()),
    )


def free_for_experts(
    memory: ProcessMemory, plan: Plan, config: OffloadConfig, *, computes_here: bool = True
) -> int:
    """The bytes that are left for experts once the dense weights are loaded. `computes_here`: keys
    and activations are in the memory of the host, too, and slots give way to them.
    """
    left = memory.left()
    if computes_here and linux.is_linux():
        return left - plan.step_bytes(config.kv_dtype, config.is_exact).from_the_start()
    return int(left * FIXED_SHARE)


def _bookkeeping(
    plan: Plan,
    loader: ExpertLoader,
    config: OffloadConfig,
    device_slots: DeviceSlots | None,
    layer_slot_bytes: list[int],  # by MoE layer: the slot size its experts need
    local_LE: NDArray[np.bool_] | None,
    free_bytes: int,
) -> Bookkeeping:
    """The tiers, and the bookkeeping of what happens in them."""
    num_experts = max(layer.num_experts for layer in plan.layers)
    keys = [
        [ExpertKey(moe_layer_idx, expert_idx) for expert_idx in range(layer.num_experts)]
        for moe_layer_idx, layer in enumerate(plan.layers)
    ]
    predictor = None
    if config.policy == ACTIVATION_AWARE:
        predictor = Predictor(len(keys), num_experts, without=config.without)
    tiers = make_tiers(
        config,
        device_slots,
        layer_slot_bytes=layer_slot_bytes,
        num_experts=sum(map(len, keys)) if local_LE is None else int(local_LE.sum()),
        free_bytes=free_bytes,
        bytes_in_place=lambda: sum(
            recipes.bytes_in_place(
                len(own) if local_LE is None else int(local_LE[i].sum()), max(layer_slot_bytes)
            )
            for i, (own, recipes) in enumerate(zip(keys, plan.recipes, strict=True))
        ),
        make_policy=partial(
            make_policy,
            config.policy,
            num_layers=len(keys),
            num_experts=num_experts,
            chances=predictor,
        ),
        fills=(loader.read, loader.read_ahead),
        shared=loader.shared,
        in_file_order=loader.in_file_order,
        mapped=loader.mapped,
        can_map=loader.can_map,
    )
    return Bookkeeping(
        tiers=tiers,
        keys=keys,
        num_experts=num_experts,
        layer_bytes=[recipes.bytes_per_expert() for recipes in plan.recipes],
        predictor=predictor,
        keeps_history=config.history is not None,
        local_LE=local_LE,
    )


def _layer_path(
    plan: Plan, config: OffloadConfig, bookkeeping: Bookkeeping, early_router: EarlyRouter | None
) -> LayerPath:
    """How a layer runs in the tier that computes."""
    tier = bookkeeping.tiers[0]
    computers = [
        LayerComputer(
            layer,
            recipes,
            tier.slots,
            is_exact=config.is_exact,
            is_eager=config.experts_implementation == "eager",
            copies_experts=config.device == "mps",
        )
        for layer, recipes in zip(plan.layers, plan.recipes, strict=True)
    ]
    if isinstance(tier.slots, DeviceSlots) and not config.is_exact:
        is_required = config.experts_implementation == "fast"
        use_kernel(plan, computers, tier.slots, is_required=is_required)
    is_on_cpu = isinstance(tier.mover, Mover)
    prefetcher = None
    is_tried = config.prefetch is None and len(bookkeeping.tiers) == 1  # a GPU decides by itself
    if config.prefetch or (is_tried and config.policy == ACTIVATION_AWARE):
        pay_off = PayOff() if is_tried else None
        prefetcher = Prefetcher(
            tier.table, tier.policy, tier.mover, bookkeeping.local_LE, pay_off=pay_off
        )
    return LayerPath(
        tier=tier,
        computers=computers,
        bookkeeping=bookkeeping,
        prefetcher=prefetcher,
        early_router=early_router,
        stream=tier.mover.stream if config.stream_layers else None,
        is_on_cpu=is_on_cpu,
    )


def warn_of_slow_experts(plan: Plan, local: LocalExperts) -> None:
    """Warn of packed experts that kernels would read if they were of another type."""
    computers = local.path.computers
    slow = [recipes for recipes, own in zip(plan.recipes, computers, strict=True) if own.is_slow]
    if slow:
        weights = (w for recipes in slow for recipe in recipes.recipes for w in recipe.weights)
        kinds = ", ".join(sorted({weight.kind for weight in weights}))
        logger.warning(
            "no kernel reads the experts of %d of %d layers (types: %s): each use unpacks them, "
            "which is slow\nhint: some types, and experts of few columns, have none "
            "(docs/checkpoints.md)", len(slow), len(computers), kinds,
        )  # fmt: skip
