"""Predicts which experts the next MoE layer will choose by running its own router early, on the
residual that the current layer was given.

The residual changes little from layer to layer, so most predictions are right: 80 % of the experts
on the demo model (notes/log.md, 2026-11-21). No router has to be known by name: the block around
the experts is called as the model calls it, and our experts function, instead of computing, raises
an exception that carries the routing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe_infinity.architectures.adapters import ExpertsModule
from moe_infinity.architectures.module_state import has_hooks
from moe_infinity.experts import Ints, Step
from moe_infinity.predict.predictor import Predictor


class Routed(BaseException):
    """Carries the routing out of a block that was run for nothing more. It is not an error."""

    def __init__(self, top_k_index_TK: Ints | None) -> None:
        super().__init__()
        self.top_k_index_TK = top_k_index_TK


class EarlyRouter:
    """Runs the block of the next MoE layer up to its experts. The norm before each block is found
    in the first forward pass, as the module that made the block's input. An MoE layer whose norm is
    not found gets no prediction.
    """

    def __init__(self, model: nn.Module, layers: list[ExpertsModule]) -> None:
        self.is_asking = False  # the experts function raises Routed while this is set
        self._blocks = [model.get_submodule(layer.block_name) for layer in layers]
        experts = {module for layer in layers for module in layer.module.modules()}
        self._asked = [[m for m in block.modules() if m not in experts] for block in self._blocks]
        self._has_reached_end = False
        self._norms: dict[int, nn.Module] = {}
        self._residual: Tensor | None = None
        self._made_by: dict[int, tuple[nn.Module, Tensor]] = {}  # id of an output -> its norm
        self._hooks = self._watch(model)

    def _watch(self, model: nn.Module) -> list[RemovableHandle]:
        """Install hooks that find the norms in one forward pass."""
        norms = [m for m in model.modules() if "norm" in type(m).__name__.lower()]
        hooks = [norm.register_forward_hook(self._note_output) for norm in norms]
        for moe_layer_idx, block in enumerate(self._blocks):
            finder = self._finder_of(moe_layer_idx)
            hooks.append(block.register_forward_pre_hook(finder, with_kwargs=True))
        return hooks

    def _note_output(self, norm: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._made_by[id(output)] = norm, output  # kept alive, so its id is not used again

    def _finder_of(self, moe_layer_idx: int) -> Any:
        def find(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = [*args, *kwargs.values()]
            norm = self._made_by.get(id(inputs[0])) if inputs else None
            self._made_by.clear()
            self._has_reached_end |= moe_layer_idx == len(self._blocks) - 1
            if norm is not None and len(inputs) == 1 and moe_layer_idx not in self._norms:
                self._norms[moe_layer_idx] = norm[0]
                norm[0].register_forward_pre_hook(self._note_input)

        return find

    def _note_input(self, norm: nn.Module, args: tuple[Any, ...]) -> None:
        if not self.is_asking and args:
            self._residual = args[0]

    def note_residual(self, residual: Tensor) -> None:
        """Keep what the norm before a block would be given: a kernel computes that norm."""
        self._residual = residual

    def begin_step(self) -> None:
        """Begin a forward pass. After one that reached the last layer the search for norms ends."""
        self._residual = None
        if not (self._hooks and self._has_reached_end):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._made_by.clear()

    def hint(self, moe_layer_idx: int, step: Step, predictor: Predictor) -> None:
        """Give the predictor what the router of this MoE layer chooses for the step's tokens,
        without padding and sequences that have ended.
        """
        top_k_index_TK = self.ask(moe_layer_idx)
        if top_k_index_TK is not None:
            if step.counted_T is not None:
                top_k_index_TK = top_k_index_TK[step.counted_T]
            predictor.hint(moe_layer_idx, top_k_index_TK)

    @torch.no_grad()
    def ask(self, moe_layer_idx: int) -> Ints | None:
        """Return [T, K], the experts that the block of this MoE layer would choose. None if its
        norm was not found, or if this step did not come to a residual yet.
        """
        if moe_layer_idx not in self._norms or self._residual is None:
            return None
        block = self._blocks[moe_layer_idx]
        norm = self._norms[moe_layer_idx]
        asked = self._asked[moe_layer_idx]
        if any(has_hooks(module, ours=self) for module in (norm, *asked)):
            return None  # they would see a call that the model does not make
        self.is_asking = True
        try:
            block(norm(self._residual))
        except Routed as routed:
            return routed.top_k_index_TK
        finally:
            self.is_asking = False
        return None
