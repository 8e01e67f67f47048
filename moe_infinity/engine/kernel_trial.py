"""The trial of the kernel of experts on a GPU. When a model is loaded, the kernel and torch
compute some experts in the slots themselves, and if they differ torch computes from then on. Plain
experts are random numbers; packed ones, whose bits not all are numbers, come from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from moe_infinity.architectures.trial import FellBack, Found, Verdict
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.engine.compute import LayerComputer
from moe_infinity.engine.expert_kernels import slot_layer
from moe_infinity.engine.slots import PairKernels, SlotBackend, SlotWork
from moe_infinity.engine.torch_backend import TorchBackend, TorchWork
from moe_infinity.errors import ConfigError
from moe_infinity.experts import Routing
from moe_infinity.kernels.triton import has_triton
from moe_infinity.kernels.triton.slot_mlp import SlotMlp
from moe_infinity.memory.device import DeviceSlots

# Tokens, and the size of their numbers: tiles of both sizes, and experts with less than a tile;
# activations that are told apart, and their limits.
TRIED = ((1, 0.5), (5, 8.0), (2100, 1.0))
TRIED_EXPERTS = 3
TRIED_TOP_K = 2
# Of the norm of a token's output. The reference of the kernel was up to 0.009 away from torch in
# bfloat16, 0.0011 in float16, 0.00001 in float32 (on a CPU; torch may use TF32 on a GPU). One of
# 32 blocks of columns that is left out makes 0.18.
TOLERANCES = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def use_kernel(
    plan: Plan, computers: Sequence[LayerComputer], slots: DeviceSlots, *, is_required: bool
) -> None:
    """Let the layers of a model compute by the kernel where it agrees with torch. The slots are
    overwritten. Raises ConfigError if `is_required` and it does not agree everywhere.
    """
    kernels = pair_kernels(slots.device)
    tried: dict[SlotMlp, str | None] = {}  # why the kernel is not used, by kind of layer
    for layer, recipes, computer in zip(plan.layers, plan.recipes, computers, strict=True):
        verdict: Verdict[SlotBackend] = FellBack("triton is not installed")
        mlp = slot_layer(layer, recipes)
        if isinstance(mlp, FellBack):
            verdict = mlp
        elif kernels is not None:
            backend = SlotBackend(
                kernels, mlp.path, slots.address_of, num_experts=layer.num_experts
            )
            if mlp.path not in tried:
                fill = partial(_fill_randomly, computer.by_torch, slots.device)
                tried[mlp.path] = disagreement(
                    backend, computer.by_torch, slots, layer.dtype, fill=fill,
                    tolerance=TOLERANCES[layer.dtype],
                )  # fmt: skip
            reason = tried[mlp.path]
            verdict = Found(backend) if reason is None else FellBack(reason)
        if is_required and isinstance(verdict, FellBack):
            raise ConfigError(
                f"experts_implementation='fast' needs the kernel of experts: {verdict.reason}\n"
                "hint: experts_implementation='auto' lets torch compute them"
            )
        computer.verdict = verdict
        if isinstance(verdict, Found):
            computer.by_slots = verdict.path
            computer.how = "by one kernel"
        else:
            computer.how = f"by torch: {verdict.reason}"


def pair_kernels(device: torch.device) -> PairKernels | None:
    """Return Triton's kernels. None: there are none for the device, or triton is not installed."""
    if device.type != "cuda" or not has_triton():
        return None
    from moe_infinity.kernels.triton.experts import compute_pairs, sum_pairs

    return PairKernels(compute_pairs, sum_pairs)


@torch.no_grad()
def disagreement(
    backend: SlotBackend,
    by_torch: TorchBackend,
    slots: DeviceSlots,
    dtype: torch.dtype,
    *,
    fill: Callable[[int], None],
    tolerance: float,
) -> str | None:
    """Return why the kernel is not to be used: what it raised, or how far it is from torch. None if
    both agree, but for `tolerance` of the norm of a token's output, on the experts that `fill` puts
    into the first slots, in products of `dtype`.
    """
    num_experts = min(TRIED_EXPERTS, backend.num_experts, slots.num_slots)
    for slot_id in range(num_experts):
        fill(slot_id)
    generator = torch.Generator(slots.device).manual_seed(TRIED_EXPERTS)
    try:
        for num_tokens, size in TRIED:
            shape = num_tokens, backend.mlp.down.num_rows
            x_TD = torch.randn(shape, generator=generator, dtype=dtype, device=slots.device)
            distance = _distance(backend, by_torch, size * x_TD, num_experts)
            if not distance <= tolerance:
                return f"the kernel is {distance:.2g} away from torch with {num_tokens} tokens"
    except Exception as error:  # what a compiler or a driver raises
        first_line = str(error).partition("\n")[0]
        return f"the kernel raised {type(error).__name__}: {first_line}"
    return None


def _fill_randomly(by_torch: TorchBackend, device: torch.device, slot_id: int) -> None:
    generator = torch.Generator(device).manual_seed(slot_id)
    for weight in by_torch.weights_of(slot_id).values():
        weight.normal_(generator=generator)
        if weight.ndim > 1:
            weight /= weight.shape[-1] ** 0.5


def _distance(
    backend: SlotBackend, by_torch: TorchBackend, x_TD: Tensor, num_experts: int
) -> float:
    """The largest distance of a token's two outputs, as a share of torch's; NaN if any is NaN."""
    top_k = min(TRIED_TOP_K, num_experts)
    token_T1 = torch.arange(len(x_TD), device="cpu")[:, None]
    index_TK = (token_T1 + torch.arange(top_k, device="cpu")) % num_experts
    weights_TK = (0.25 + 0.5 * index_TK / num_experts).to(x_TD)
    routing = Routing.of(index_TK, weights_TK)
    outputs = []
    for work in (SlotWork(backend, x_TD, routing), TorchWork(by_torch, x_TD, routing)):
        for expert_idx in reversed(routing.activated):  # as if they came one after the other
            work.compute([expert_idx], [expert_idx])
        outputs.append(work.sum().float())
    apart_T = (outputs[0] - outputs[1]).norm(dim=1) / outputs[1].norm(dim=1)
    return float(apart_T.max())
