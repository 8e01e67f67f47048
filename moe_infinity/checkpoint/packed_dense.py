"""Dense weights that stay packed, as kernels of ours multiply with them: those of linear layers,
where a checkpoint has the parameter as it is, under its own name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from moe_infinity.architectures.model_parts import PackedLinear
from moe_infinity.checkpoint.extents import StoredTensor
from moe_infinity.checkpoint.layout import PackedWeight, WeightLayout
from moe_infinity.checkpoint.packing import PackedTensor
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.checkpoint.reader import Reader
from moe_infinity.experts import ExpertLayout
from moe_infinity.memory.pages import uint8_memory


@dataclass(frozen=True, slots=True)
class PackedDense:
    """The weight of one linear layer, still on disk."""

    linear: str  # name of the module
    layout: WeightLayout
    parts: tuple[tuple[StoredTensor, int], ...]  # and where each begins in memory
    num_bytes: int

    def put_into(self, model: nn.Module, reader: Reader) -> None:
        """Read it, and let it take the place of the linear layer."""
        memory = uint8_memory(self.num_bytes)
        for tensor, offset in self.parts:
            reader.read_into(
                tensor.extent, memory.numpy().data[offset : offset + tensor.extent.num_bytes]
            )
        owner, _, name = self.linear.rpartition(".")
        linear: Any = model.get_submodule(self.linear)
        packed = PackedLinear(linear, PackedWeight(self.layout, memory), linear.weight.dtype)
        setattr(model.get_submodule(owner), name, packed)


def find_packed_dense(
    model: Any, plan: Plan, rules: list[Any], reads: Callable[[WeightLayout], bool]
) -> list[PackedDense]:
    """Of the linear layers of a model on the meta device. `reads`: whether kernels do."""
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    meta = model.state_dict()
    prefix = model.base_model_prefix
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    found = []
    for name, module in model.named_modules():
        param = f"{name}.weight"
        weight = plan.dense.get(param)
        if type(module) is not nn.Linear or not isinstance(weight, PackedTensor):
            continue
        if param in tied or weight.shape != module.weight.shape or weight.format.is_transposed:
            continue
        if rename_source_key(param, renamings, converters, prefix, meta) != (param, None):
            continue
        dense = _placed(name, weight)
        if reads(dense.layout):
            found.append(dense)
    return found


def _placed(linear: str, weight: PackedTensor) -> PackedDense:
    shapes = {role: (tensor.shape, tensor.dtype) for role, tensor in weight.parts}
    layout = ExpertLayout.of(shapes)
    specs = {spec.name: spec for spec in layout.params}
    return PackedDense(
        linear,
        weight.format.place(specs, is_transposed=False),
        tuple((tensor, specs[role].offset) for role, tensor in weight.parts),
        layout.slot_bytes,
    )
