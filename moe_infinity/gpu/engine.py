"""The engine that drives a GPU by default, see engine/experts.py.

decode step of few tokens     the device decides, once HOST has all experts (device_steps.py);
                              attention by our kernels, all of it as a graph (graphed_step.py)
everything else               the host decides, as in LocalExperts
    every expert has a slot   no layer waits for its routing, which comes to the host later
modules around the experts    few kernels each, where that gives what their own code gives
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moe_infinity.architectures.adapters import ExpertCalls
from moe_infinity.architectures.trial import FellBack, Found, Verdict
from moe_infinity.checkpoint.expert_loader import ExpertLoader
from moe_infinity.checkpoint.plan import Plan
from moe_infinity.config import OffloadConfig
from moe_infinity.engine.engine import LocalExperts, anonymous_step
from moe_infinity.engine.expert_kernels import slot_layer
from moe_infinity.engine.experts import Experts
from moe_infinity.engine.kernel_trial import TOLERANCES, disagreement
from moe_infinity.engine.slots import PairWork, SlotBackend
from moe_infinity.errors import Cancelled, ConfigError, UnsupportedModelError
from moe_infinity.experts import ExpertKey, Ints, Routing, Step
from moe_infinity.gpu.device_steps import DeviceSteps
from moe_infinity.gpu.fused_modules import FusedModules
from moe_infinity.gpu.graphed_step import GraphedStep, has_graphs
from moe_infinity.gpu.kernels import Kernels, kernels_for
from moe_infinity.gpu.kernels.packed_matrix import any_matrix, splits_words
from moe_infinity.kernels.triton import has_triton
from moe_infinity.kernels.triton.slot_mlp import SlotMlp
from moe_infinity.memory.cuda import CudaDevice
from moe_infinity.memory.device import DeviceSlots

logger = logging.getLogger(__name__)


class DeviceExperts:
    """Routed experts of which the device decides, where it can. Used by one thread at a time."""

    def __init__(
        self,
        local: LocalExperts,
        model: PreTrainedModel,
        plan: Plan,
        mlps: Sequence[SlotMlp],  # by MoE layer: how kernels read its experts
        kernels: Kernels,
    ) -> None:
        self._local = local
        self._kernels = kernels
        slots = local.tiers[0].slots
        assert isinstance(slots, DeviceSlots), slots
        self._device = slots.device
        self._coming = ComingRouting(slots.cuda_device)
        self._resident_pointers: dict[int, Tensor] = {}  # by MoE layer, while all are in slots
        self._backends = [
            SlotBackend(kernels.pairs, mlp, slots.address_of, num_experts=layer.num_experts)
            for mlp, layer in zip(mlps, plan.layers, strict=True)
        ]
        # No token may depend on who decides, so the host computes by the same kernels.
        for computer, backend in zip(local.path.computers, self._backends, strict=True):
            computer.by_slots = backend
            computer.verdict = Found(backend)
        local.description = f"{plan.packing or 'as stored'}, with CUDA graphs"
        self.device_steps = DeviceSteps(local.bookkeeping, mlps, kernels)
        with _without_experts(model, plan):
            self.graphed = GraphedStep(model, self.device_steps, FusedModules(model, kernels))

    @property
    def local(self) -> LocalExperts:
        """The experts of this process, which the host decides about."""
        return self._local

    def begin_step(self, step: Step) -> None:
        """Begin a forward pass. The device decides in it if it can."""
        with self._local.deciding:
            self._note_coming()
            bookkeeping = self._local.bookkeeping
            if self._local.tiers[0].table.num_resident == bookkeeping.total_experts:
                bookkeeping.note_all_resident()
            self._local.recover()
            may_decide = self.graphed.look() and not self._local.path.is_prefetching
            if may_decide and self.device_steps.begin_step(step):
                return
            self.device_steps.leave_to_host()
            self._local.begin_step(step)

    def layer(
        self, moe_layer_idx: int, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor
    ) -> Tensor:
        """Return [T, D], as `Experts.layer` does and with the same errors."""
        given = x_TD, top_k_index_TK, top_k_weights_TK
        if self.device_steps.is_running:
            return self.device_steps.run_layer(moe_layer_idx, *given)
        num_tokens, self.device_steps.top_k[moe_layer_idx] = top_k_index_TK.shape
        if not self._local.is_next(moe_layer_idx, num_tokens):
            self.begin_step(anonymous_step(num_tokens))
        try:
            pointers_E = self._pointers_of_residents(moe_layer_idx)
            if pointers_E is None or self.graphed.change is not None:
                self._note_coming()
                return self._local.layer(moe_layer_idx, *given)
            self._note_later(moe_layer_idx, top_k_index_TK)
        except Cancelled:
            self._coming.take()  # the step is not recorded
            raise
        work = PairWork(self._kernels.pairs, self._backends[moe_layer_idx].mlp, *given)
        work.compute(pointers_E)
        return work.sum()

    def _pointers_of_residents(self, moe_layer_idx: int) -> Tensor | None:
        """The addresses of a layer's experts if those of all layers are in their slots. Then a
        layer need not wait until the host knows its routing.
        """
        bookkeeping = self._local.bookkeeping
        table = self._local.tiers[0].table
        if table.num_resident < bookkeeping.total_experts:
            self._resident_pointers.clear()
            return None
        if moe_layer_idx not in self._resident_pointers:
            keys = bookkeeping.keys[moe_layer_idx]
            slot_ids = table.slots_of(keys)
            backend = self._backends[moe_layer_idx]
            pointers_E = backend.pointers(range(len(keys)), slot_ids, self._device)
            self._resident_pointers[moe_layer_idx] = pointers_E
        return self._resident_pointers[moe_layer_idx]

    def _note_later(self, moe_layer_idx: int, top_k_index_TK: Tensor) -> None:
        """Enter a layer whose routing the bookkeeping has later."""
        with self._local.deciding:
            self._local.enter(moe_layer_idx)
            self._coming.add(moe_layer_idx, top_k_index_TK)

    def _note_coming(self) -> None:
        """Enter such routing in the bookkeeping. Waits for the device."""
        for moe_layer_idx, top_k_index_TK in self._coming.take():
            self._local.bookkeeping.note_residents(moe_layer_idx, top_k_index_TK)

    def note_state(self) -> None:
        """Note what all modules of the model are like."""
        self._local.note_state()
        self.graphed.note_state()

    def leave_step(self) -> None:
        """End a pass that did not reach its last layer. A step of the device that was interrupted
        is not recorded when it is reset.
        """
        self._note_coming()
        if self.device_steps.finish_step():
            self._local.leave_step()

    def synchronize(self) -> None:
        """Wait for the device, and enter in the bookkeeping what it has not reported so far."""
        self._note_coming()
        self.device_steps.conclude()

    def check_invariants(self) -> None:
        """Assert that the bookkeeping is consistent, and that host and device agree on it."""
        self._local.check_invariants()
        self.device_steps.check_invariants()

    def close(self) -> None:
        """Give the model its own forward method back, and close the experts."""
        self.graphed.close()
        self.synchronize()
        self._local.close()


class ComingRouting:
    """The routing of layers of a step, on its way to the host."""

    def __init__(self, cuda_device: CudaDevice) -> None:
        self._cuda_device = cuda_device
        self._layers: list[tuple[int, Tensor]] = []

    def add(self, moe_layer_idx: int, top_k_index_TK: Tensor) -> None:
        """Begin a copy that no thread waits for."""
        self._layers.append((moe_layer_idx, top_k_index_TK.to("cpu", non_blocking=True)))

    def take(self) -> list[tuple[int, Ints]]:
        """Return the routing of layers in their order. Waits for the device."""
        if not self._layers:
            return []
        self._cuda_device.mark().synchronize()
        layers = [(moe_layer_idx, index_TK.numpy()) for moe_layer_idx, index_TK in self._layers]
        self._layers.clear()
        return layers


class _NoExperts:
    """An MoE layer that gives zeros, for trials of what surrounds it."""

    def __call__(self, x_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
        return torch.zeros_like(x_TD)

    def answer_calls(self, calls: ExpertCalls, routing: Routing) -> None:
        raise UnsupportedModelError("a block that calls its experts one by one")

    def residents(self) -> None:
        return None

    def note(self, top_k_index_TK: Ints) -> None:
        raise AssertionError("there are no residents")


@contextmanager
def _without_experts(model: PreTrainedModel, plan: Plan) -> Iterator[None]:
    """Inside, the experts of every layer give zeros."""
    for layer in plan.layers:
        layer.adapter.connect(layer, model, _NoExperts())
    try:
        yield
    finally:  # what adapters may have replaced; the model connects its experts next
        for layer in plan.layers:
            for module in (layer.module, model.get_submodule(layer.block_name)):
                vars(module).pop("forward", None)


def drive(
    local: LocalExperts, model: PreTrainedModel, plan: Plan, config: OffloadConfig
) -> Experts:
    """Return this engine on top of `local`, which still decides in prompts. With gpu_engine="auto"
    return `local` itself where the engine cannot work; else raise ConfigError.
    """
    if config.gpu_engine == "graphs":
        return _build(local, model, plan, config)
    if not has_graphs(local.tiers[0].slots.device):
        return local
    try:
        return _build(local, model, plan, config)
    except ConfigError as error:
        logger.info("the host decides in every layer: %s", error)
        return local


def _build(
    local: LocalExperts, model: PreTrainedModel, plan: Plan, config: OffloadConfig
) -> DeviceExperts:
    """Raises ConfigError if the engine cannot work."""
    obstacles = list(_obstacles(local, model, config))
    mlps: list[SlotMlp] = []
    if not obstacles:
        kernels = kernels_for(local.tiers[0].slots.device)
        verdicts = list(_kernel_verdicts(local, plan, kernels))
        mlps = [verdict.path for verdict in verdicts if isinstance(verdict, Found)]
        obstacles = sorted({v.reason for v in verdicts if isinstance(v, FellBack)})
    if obstacles:
        raise ConfigError(
            f"gpu_engine='graphs' cannot run this model: {', '.join(obstacles)}\n"
            "hint: gpu_engine='auto' runs it without"
        )
    return DeviceExperts(local, model, plan, mlps, kernels)


def _kernel_verdicts(
    local: LocalExperts, plan: Plan, kernels: Kernels
) -> Iterator[Verdict[SlotMlp]]:
    """Say for each MoE layer how kernels read its experts, packed or not. What
    engine/kernel_trial.py has not found to agree with torch is tried here, with experts of the
    checkpoint.
    """
    slots = local.tiers[0].slots
    assert isinstance(slots, DeviceSlots), slots
    tried: dict[SlotMlp, str | None] = {}
    layers = zip(plan.layers, plan.recipes, local.path.computers, strict=True)
    for moe_layer_idx, (layer, recipes, computer) in enumerate(layers):
        mlp = slot_layer(layer, recipes, matrix_of=any_matrix)
        if isinstance(mlp, FellBack):
            yield mlp
            continue
        if splits_words(mlp.path):
            yield FellBack("gate and up of its experts share words")
            continue
        if not isinstance(computer.verdict, Found) and mlp.path not in tried:
            backend = SlotBackend(
                kernels.pairs, mlp.path, slots.address_of, num_experts=layer.num_experts
            )
            tried[mlp.path] = disagreement(
                backend,
                computer.by_torch,
                slots,
                layer.dtype,
                fill=partial(_fill, local.loader, moe_layer_idx, slots),
                tolerance=TOLERANCES[torch.bfloat16],  # torch rounds to the dtype of scales
            )
        reason = tried.get(mlp.path)
        yield mlp if reason is None else FellBack(reason)


def _fill(loader: ExpertLoader, moe_layer_idx: int, slots: DeviceSlots, expert_idx: int) -> None:
    """Read an expert into the slot of its own number."""
    num_bytes = loader.recipes[moe_layer_idx].layout.slot_bytes
    stored = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    loader.read(ExpertKey(moe_layer_idx, expert_idx), stored.numpy().data)
    slots.tensor_of(expert_idx, num_bytes).copy_(stored)


def _obstacles(local: LocalExperts, model: PreTrainedModel, config: OffloadConfig) -> Iterator[str]:
    if config.is_exact:
        yield "its results are not exact"
    if config.early_router:
        yield "it does not ask routers early"
    if config.kv_dtype != "auto":
        yield "its kernels do not read packed keys and values"
    if model.config.is_encoder_decoder:
        yield "the model has an encoder"
    if len(local.tiers) == 1:
        yield "there is no CUDA GPU"
        return
    if local.tiers[0].slots.device.type == "cuda" and not has_triton():
        yield "triton is not installed"
