"""Builds the experimental engine, or says why it cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedModel

from moe_infinity.architectures.trial import Found
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.config import OffloadConfig
from moe_infinity.engine.engine import LocalExperts
from moe_infinity.engine.expert_kernels import slot_layer
from moe_infinity.errors import ConfigError
from moe_infinity.experimental.gpu.engine import DeviceExperts
from moe_infinity.experimental.gpu.kernels import kernels_for
from moe_infinity.experimental.gpu.kernels.packed_matrix import any_matrix, splits_words
from moe_infinity.kernels.triton import has_triton


def build_device_experts(
    local: LocalExperts, model: PreTrainedModel, plan: Plan, config: OffloadConfig
) -> DeviceExperts:
    """Build the engine on top of `local`, which still decides in prompts. Raises ConfigError if it
    cannot work.
    """
    pairs = zip(plan.layers, plan.recipes, strict=True)
    described = [slot_layer(*pair, matrix_of=any_matrix) for pair in pairs]
    found = [mlp.path for mlp in described if isinstance(mlp, Found)]
    mlps = [mlp for mlp in found if not splits_words(mlp)]
    obstacles = list(_obstacles(local, model, config))
    if len(mlps) < len(described):
        obstacles.append("kernels do not read all of its experts")
    if obstacles:
        raise ConfigError(
            f"gpu_engine='graphs' cannot run this model: {', '.join(obstacles)}\n"
            "hint: use gpu_engine='host'"
        )
    return DeviceExperts(local, model, plan, mlps, kernels_for(local.tiers[0].slots.device))


def _obstacles(local: LocalExperts, model: PreTrainedModel, config: OffloadConfig) -> Iterator[str]:
    if config.is_exact:
        yield "its results are not exact"
    if config.prefetch or config.early_router:
        yield "it does not prefetch"
    if model.config.is_encoder_decoder:
        yield "the model has an encoder"
    if len(local.tiers) == 1:
        yield "there is no CUDA GPU"
        return
    if local.tiers[1].slots.num_slots < local.bookkeeping.total_experts:
        yield "host_memory has no room for all experts"
    if local.tiers[0].slots.device.type == "cuda" and not has_triton():
        yield "triton is not installed"
