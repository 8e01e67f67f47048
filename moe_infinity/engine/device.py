"""Where a model computes: the CPU, a device with slots for experts beside its dense weights, or any
other device of torch, to which experts are copied as they compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from moe_infinity.checkpoint import expert_loader
from moe_infinity.checkpoint.packed_plan import packed_on_load
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.config import OffloadConfig
from moe_infinity.errors import ConfigError, OutOfMemory
from moe_infinity.formats.methods import PACKED_BY_US
from moe_infinity.layout import WeightLayout
from moe_infinity.memory.cuda import CudaDevice, open_cuda_device
from moe_infinity.memory.device import SLOT_ALIGNMENT, DeviceSlots, num_device_slots, round_up
from moe_infinity.memory.room import ProcessMemory
from moe_infinity.sizes import format_bytes
from moe_infinity.system import linux

if TYPE_CHECKING:
    from moe_infinity.architectures.early_router import EarlyRouter
    from moe_infinity.architectures.prompt_blocks import PromptBlocks
    from moe_infinity.architectures.small_batch import SmallBatchSteps


TABLE_SHARE = 16  # of the memory: a larger embedding is looked up in its file


def in_slots(plan: Plan, config: OffloadConfig) -> Plan:
    """How experts lie in slots. Raises UnsupportedModelError for an `expert_dtype` that they cannot
    have.
    """
    if config.expert_dtype is not None:
        return packed_on_load(plan, config.expert_dtype, PACKED_BY_US)
    if not config.is_exact:  # two products in place of one may have other bits
        for layer, recipes in zip(plan.layers, plan.recipes, strict=True):
            if layer.is_transposed is False:
                recipes.split()
    return plan


class ComputeDevice:
    """Raises ConfigError if the configured device is not there."""

    def __init__(self, config: OffloadConfig) -> None:
        self._config = config
        self._cuda_device = open_cuda_device(config.device)
        if self._cuda_device is None and config.device_memory is not None:
            raise ConfigError(
                "device_memory needs a CUDA device, torch finds none\nhint: use host_memory"
            )
        self.device = torch.device("cpu")
        if self._cuda_device is not None:
            self.device = self._cuda_device.device
        elif config.device == "mps":
            self.device = _mps()
        self.slots: DeviceSlots | None = None  # of a GPU, once the plan is known

    @property
    def is_cpu(self) -> bool:
        """True if the model computes on the CPU, as experts do; known once `prepare` has run."""
        return self.slots is None and self.device.type == "cpu"

    def prepare(self, plan: Plan, dense_bytes: int, mappable_bytes: int) -> Plan:
        """Before anything large is read: how experts lie in slots, the slots of the device, and if
        dense weights, of which `mappable_bytes` lie in files as in memory, are used there. Raises
        ConfigError.
        """
        plan = in_slots(plan, self._config)
        if self._cuda_device is not None:
            self.slots = self._make_slots(self._cuda_device, plan, dense_bytes)
        if self.is_cpu and self._config.host_memory is None:
            self._require_room(dense_bytes)
        if mappable_bytes and self.is_cpu and self._has_room_for_all(plan, dense_bytes):
            plan.dense_in_page_cache = mappable_bytes
        return plan

    def _require_room(self, dense_bytes: int) -> None:
        left = ProcessMemory(self._config.memory_bytes).left()
        if dense_bytes > left:
            raise ConfigError(
                f"all weights but experts take {format_bytes(dense_bytes)}, and memory has "
                f"{format_bytes(max(left, 0))} left\n"
                "hint: raise memory if it is set, or take a checkpoint packed in fewer bits"
            )

    def _has_room_for_all(self, plan: Plan, dense_bytes: int) -> bool:
        """Return True if memory has room for all weights of a large model, and may have them."""
        is_large = plan.expert_bytes >= expert_loader.MIN_MAPPED_BYTES
        if not is_large or self._config.host_memory is not None or not linux.is_linux():
            return False
        step = plan.step_bytes(self._config.kv_dtype, self._config.is_exact).from_the_start()
        left = ProcessMemory(self._config.memory_bytes).left()
        return plan.expert_bytes + dense_bytes + step <= left

    def _make_slots(self, cuda_device: CudaDevice, plan: Plan, dense_bytes: int) -> DeviceSlots:
        expert_bytes = max(recipes.layout.slot_bytes for recipes in plan.recipes)
        slot_bytes = round_up(expert_bytes, SLOT_ALIGNMENT)
        num_slots = num_device_slots(
            self._config.device_memory,
            cuda_device,
            slot_bytes=slot_bytes,
            num_experts=sum(layer.num_experts for layer in plan.layers),
            dense_bytes=dense_bytes,
        )
        return DeviceSlots(cuda_device, num_slots, slot_bytes)

    @property
    def least_table_bytes(self) -> int | None:
        """From how many bytes on a plain embedding is not loaded, but looked up in its file: a
        share of the memory. None: no embedding is, as on a GPU.
        """
        if self.device.type != "cpu":
            return None
        return ProcessMemory(self._config.memory_bytes).num_bytes // TABLE_SHARE

    def reads_packed(self, weight: WeightLayout) -> bool:
        """Return True if dense weights with this layout are multiplied as they are stored."""
        if self._config.is_exact or self.device.type != "cpu":
            return False
        from moe_infinity.kernels.cpu.product import Product  # imports numba

        return Product.of([weight]) is not None

    def speed_up_attention(self, model: Any) -> None:
        """Choose other functions of attention on a CPU, if bits need not be those of transformers.
        What memory a pass needs depends on them.
        """
        if self.is_cpu and not self._config.is_exact:
            from moe_infinity.architectures.sinks import attend_with_sinks  # imports numba

            attend_with_sinks(model)

    def small_batch_steps(
        self, model: Any, early_router: EarlyRouter | None, blocks: PromptBlocks | None
    ) -> SmallBatchSteps | None:
        """On a CPU, if the bits need not be those of transformers."""
        if self._config.is_exact or not self.is_cpu:
            return None
        from moe_infinity.architectures.small_batch import SmallBatchSteps  # imports numba

        return SmallBatchSteps(model, early_router, self._config.kv_dtype, blocks)

    def move(self, value: Any) -> Any:
        """An argument of the model: a tensor goes where the model computes."""
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Torch's error, when a device has no more memory, becomes one with our numbers in it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            if self.slots is None:
                raise
            free, total = map(format_bytes, self.slots.cuda_device.memory_bytes())
            raise OutOfMemory(
                f"out of memory: {free} of {total} are free on {self.device}, "
                f"{self.slots.num_slots} expert slots take "
                f"{format_bytes(self.slots.num_bytes)}\n"
                "hint: lower device_memory, or give shorter prompts, fewer sequences, or "
                f"prefill_chunk_size ({error})"
            ) from error


def _mps() -> torch.device:
    """The GPU of a Mac. Raises ConfigError if torch cannot use one."""
    if not torch.backends.mps.is_available():
        raise ConfigError(
            f"device 'mps' asked for, torch {torch.__version__} finds none\n"
            "hint: device='cpu'; mps needs a Mac with Apple silicon and macOS 14 or newer"
        )
    return torch.device("mps")
