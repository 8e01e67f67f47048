"""Decoder layers of a model on a CPU, in steps of one new token of each sequence. A token takes one
of two paths through them:

    resident path: all experts are in memory      cached path: they are not

    layer 0      DecoderLayer.forward             each layer   DecoderLayer.forward
                   |                                             |
                   v                                             v
                 LayersAhead.run                               DecoderSteps.attend
                   | one call of machine code                    | one call: norms, attention,
                   | computes layers 0 to n,                     | residual, the router's choice,
                   | experts included                            | a shared expert
                   |                                             v
                   v                                           the model's block of experts
                 answers 0 to n                                  |
                   | answer 0 is returned,                       v
                   | the others wait (AnsweredAhead)           engine/hooks.py
                   v                                             |
    layers 1..n  DecoderLayer.forward                            v
                   takes the answer that waits                 engine/layer.py: record, look up,
                   |                                           load, hold, compute, release
                   v                                             |
                 each tells the engine which                     v
                 experts it activated                          residual + the experts' sum + shared

Both paths give the same bits. All longer inputs run the layer's own code, and so does a call with
arguments that are not known here, or to modules that were changed or are watched (module_state.py).

decoder_search.py finds which layers the kernel can compute: one of each kind is tried when the
model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_infinity.architectures.answered_ahead import AnsweredAhead, TensorVersion
from moe_infinity.architectures.attention_inputs import (
    CACHE_NAMES,
    MASK,
    Angles,
    KeysAndValues,
    angles_and_mask,
    cache_in,
    hides_nothing,
    takes_as_stock,
)
from moe_infinity.architectures.block_search import described_router
from moe_infinity.architectures.decoder_search import LayerKind, dtype_of
from moe_infinity.architectures.early_router import EarlyRouter
from moe_infinity.architectures.model_parts import (
    NORM,
    RESIDUAL_NORM,
    attention_of,
    experts_of,
    feed_forward,
    router_of,
)
from moe_infinity.architectures.module_state import (
    ModuleState,
    has_hooks,
    replace_forward,
    stock_forward,
)
from moe_infinity.architectures.trial import Found
from moe_infinity.experts import Ints
from moe_infinity.kernels.cpu.decoder import DecoderKernel, LinearAttention
from moe_infinity.kernels.cpu.decoder_steps import Attended, Cached, DecoderSteps, States
from moe_infinity.kernels.cpu.delta_states import DeltaStates, SpareStates
from moe_infinity.kernels.residents import Residents

MOST_SEQUENCES = 64  # of a step
# Arguments of a layer that the kernel serves, or that say nothing to it; others only if not given.
SERVED = {MASK, "position_embeddings", *CACHE_NAMES}
KNOWN = SERVED | {"position_ids", "use_cache", "cache_position"}


class DecoderLayer:
    """The forward method of one decoder layer that the kernel can compute."""

    def __init__(
        self,
        layer: nn.Module,
        kind: LayerKind,
        angles: Angles | None,
        spare: SpareStates,
        early_router: EarlyRouter | None,
        *,
        kv_dtype: str,
        may_follow: bool,
    ) -> None:
        """Linear attention has no `angles`. `may_follow`: the layer directly follows the one before
        it, with the same arguments.
        """
        block = feed_forward(layer)
        gate = kind.gate.path if isinstance(kind.gate, Found) else None
        shared = kind.shared_expert.path if isinstance(kind.shared_expert, Found) else None
        chooses = None if gate is None else described_router(block, gate, shared)
        described = kind.attention.describe(layer, chooses)
        self.kernel = DecoderKernel(described, dtype_of(layer), kv_dtype)
        self.cache: Any  # KeysAndValues or DeltaStates
        if isinstance(described, LinearAttention):
            self.cache = DeltaStates(described.shape, spare)
        else:
            self.cache = KeysAndValues(self.kernel.cache_kind, self.kernel.cache_rows)
        self.angles = angles
        # Of a batch the model may make other masks than of one sequence.
        self._may_follow = {False: may_follow, True: may_follow}
        # None: kernels do not know all that follows the attention.
        self.experts = experts_of(block) if isinstance(kind.shared_expert, Found) else None
        self._early_router = early_router
        self.layer = layer
        self._attention = attention_of(layer)
        self._block = block
        self._stock = stock_forward(layer)
        router = router_of(block)
        self._router = KnownRouting(router) if chooses is not None and router is not None else None

    def connect(self, number: int, steps: DecoderSteps, ahead: LayersAhead) -> None:
        """Become the forward method of layer `number` of the steps. All else that we change of the
        layer's modules has to be changed by now.
        """
        self._number = number
        self._steps = steps
        self._ahead = ahead
        replace_forward(self.layer, self.forward)
        if self._router is not None:
            self._router.connect()
        self._state = self.state_of([self])
        if self.experts is not None:
            self._block_state = ModuleState(self._block.modules(), ours=self._early_router)

    @staticmethod
    def state_of(layers: Sequence[DecoderLayer], *, with_blocks: bool = False) -> ModuleState:
        """Return the state of what kernels replace of these layers, with or without what follows
        the attention.
        """
        parts = [layer._attention for layer in layers]
        names = NORM, RESIDUAL_NORM
        parts += [layer.layer.get_submodule(name) for layer in layers for name in names]
        parts += [layer._block for layer in layers if with_blocks]
        return ModuleState(
            (module for part in parts for module in part.modules()),
            around=[layer.layer for layer in layers],
            ours=layers[0]._early_router,
        )

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute what the layer's own forward method would."""
        if not args and (out := self._ahead.take(self._number, hidden_states, kwargs)) is not None:
            return out
        cache_layer = None if args else self.cache_layer(hidden_states, kwargs)
        if cache_layer is None:
            return self._stock(hidden_states, *args, **kwargs)
        if (out := self._ahead.run(self._number, hidden_states, kwargs)) is not None:
            return out
        if self._state.change() is not None:
            return self._stock(hidden_states, *args, **kwargs)
        return self._with_block(hidden_states, cache_layer, kwargs)

    def _with_block(self, x: Tensor, cache_layer: Any, kwargs: dict[str, Any]) -> Tensor:
        """Compute by the kernel up to the experts, then by these or the block around them."""
        cached = self.cache.open(cache_layer)
        angles, mask = angles_and_mask(self.angles, kwargs, cached)
        attended = self._steps.attend(self._number, x[:, 0], angles, cached, mask)
        self.cache.add_token(cache_layer, cached)
        residual = attended.residual[:, None]
        if self._early_router is not None:
            self._early_router.note_residual(residual)
        return residual + self._after_attention(attended)

    def _after_attention(self, attended: Attended) -> Tensor:
        """[B, 1, D]: what the block of experts adds. Its own code runs unless it is no more than
        the router, whose choice is known, experts, and a shared expert, whose output is known.
        """
        if self._router is not None:
            if self.experts is not None and self._change_of_block() is None:
                added = self.experts(
                    attended.normed, attended.top_k_index_BK, attended.top_k_weights_BK
                )
                if attended.shared_BD.numel():
                    added = added + attended.shared_BD.to(added.dtype)
                return added[:, None]
            self._router.expect(attended)
        out = self._block(attended.normed[:, None])
        whole: Tensor = out[0] if isinstance(out, tuple) else out
        return whole

    def cache_layer(self, x: Tensor, kwargs: dict[str, Any]) -> Any | None:
        """Return the layer's part of the cache; None for arguments that kernels do not know."""
        cache = cache_in(kwargs)
        index = getattr(self._attention, "layer_idx", None)
        is_for_kernel = (
            x.shape[1:] == (1, self.kernel.fixed.width)
            and x.is_contiguous()
            and len(x) <= MOST_SEQUENCES
            and x.dtype == self.kernel.dtype
            and not torch.is_grad_enabled()
            and takes_as_stock(cache)
            and index is not None
            and index < len(cache.layers)
            and all(kwargs[name] is None or kwargs[name] is False for name in kwargs.keys() - KNOWN)
            and (self.angles is None or kwargs.get("position_embeddings") is not None)
        )
        if not is_for_kernel:
            return None
        cache_layer = cache.layers[index]
        fits = self.cache.fits(cache_layer, x, kwargs.get(MASK))
        return cache_layer if fits else None

    def may_follow(self, x: Tensor) -> bool:
        """Return True if the layer is expected to get the arguments of the layer before it, and
        nothing that runs in between could change the model.
        """
        return self._may_follow[len(x) > 1] and not has_hooks(self.layer)

    def note_other_arguments(self, x: Tensor) -> None:
        """Expect other arguments from now on, for one sequence or for several."""
        self._may_follow[len(x) > 1] = False

    def changes(self) -> tuple[str | None, str | None, str | None]:
        """Return what is different from when the model was loaded, of the layer around its block,
        of the router, and of the block; the module's own code runs then.
        """
        router = None if self._router is None else self._router.change()
        return self._state.change(), router, self._change_of_block()

    def _change_of_block(self) -> str | None:
        return None if self.experts is None else self._block_state.change()

    def residents(self) -> Residents | None:
        """Return the layer's experts, if those of all layers are in memory and none has to leave.
        None also if kernels do not know all that follows the attention.
        """
        return None if self.experts is None else self.experts.residents()

    def note(self, top_k_index_TK: Ints) -> None:
        """Tell the engine that the residents were computed for these tokens."""
        assert self.experts is not None
        self.experts.note(top_k_index_TK)


class KnownRouting:
    """The forward method of a router: it returns what the kernel has chosen for its next input."""

    def __init__(self, router: nn.Module) -> None:
        self._module = router
        self._stock = stock_forward(router)
        self._attended: Attended | None = None
        self._version: TensorVersion | None = None  # of its input; None in inference mode
        replace_forward(router, self._forward)

    def connect(self) -> None:
        """Note what the router is like, with all that we change of it."""
        self._state = ModuleState((), around=[self._module])

    def change(self) -> str | None:
        """Return what is different from when the model was loaded."""
        return self._state.change()

    def expect(self, attended: Attended) -> None:
        """Keep the next input, and what the router would make of it."""
        self._attended = attended
        self._version = TensorVersion.of(attended.normed)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        attended = self._attended
        self._attended = None
        if attended is None or kwargs or len(args) != 1 or self._module._forward_pre_hooks:
            return self._stock(*args, **kwargs)
        x: Tensor = args[0]
        is_unchanged = self._version is not None and self._version.is_of(attended.normed)
        places = {(y.data_ptr(), y.numel(), y.is_contiguous()) for y in (x, attended.normed)}
        if not is_unchanged or len(places) > 1 or self.change():
            return self._stock(x)
        return attended.logits.to(x.dtype), attended.top_k_weights_BK, attended.top_k_index_BK


# The resident path


class _Answer(NamedTuple):
    """The output of a layer that the model has not called yet, and what it is for."""

    kwargs: dict[str, Any]
    cache_layer: Any
    cached: Cached | States
    mark: Tensor  # of the cache layer, to which a token is added
    has_mask: bool  # True if it hides a token
    out: Tensor
    top_k_index_BK: Ints


class LayersAhead:
    """The decoder layers of one model that the kernel computes, in the order of the model. One call
    computes a layer and all that follow, while the experts of all of them are in memory.
    """

    def __init__(self, steps: DecoderSteps, layers: Sequence[DecoderLayer]) -> None:
        """Connects the layers."""
        self._steps = steps
        self._layers = layers
        self._answers: AnsweredAhead[int, _Answer] = AnsweredAhead()
        for number, layer in enumerate(layers):
            layer.connect(number, steps, self)
        known = [layer for layer in layers if layer.experts is not None]
        self._state = DecoderLayer.state_of(known, with_blocks=True) if known else None

    def take(self, number: int, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the output of layer `number`; None if it was not computed for these arguments. If
        only the keyword arguments differ, no later step computes ahead from the layer before it.
        Masks may differ, as those of a layer with a window do, if none hides anything.
        """
        answer = self._answers.take(number, x)
        if answer is None:
            return None
        layer = self._layers[number]
        if not self._is_for(answer, layer, x, kwargs):
            layer.note_other_arguments(x)
            return None
        mark = layer.cache.mark(answer.cache_layer)
        return self._enter(number, answer) if answer.mark is mark else None

    @staticmethod
    def _is_for(answer: _Answer, layer: DecoderLayer, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """True for keyword arguments with which the layer would give this answer."""
        if kwargs.keys() != answer.kwargs.keys():
            return False
        others = [name for name in kwargs if kwargs[name] is not answer.kwargs[name]]
        if others != [MASK]:
            return not others
        fits: bool = layer.cache.fits(answer.cache_layer, x, kwargs[MASK])
        return fits and not answer.has_mask and hides_nothing(kwargs[MASK])

    def run(self, number: int, x: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
        """Return the output of layer `number`, and compute all that follow as far as possible. None
        if its experts are not all in memory.
        """
        self._answers.clear()
        residents, cache_layers = self._reach(number, x, kwargs)
        if not residents:
            return None
        layers = self._layers[number : number + len(residents)]
        cached = [layer.cache.open(own) for layer, own in zip(layers, cache_layers, strict=True)]
        shared = next((layer.angles for layer in layers if layer.angles is not None), None)
        angles, mask = angles_and_mask(shared, kwargs, cached[0])
        outs, routings = self._steps.run(number, x[:, 0], angles, cached, mask, residents)
        has_mask = mask is not None
        answers = [
            _Answer(
                kwargs, own, opened, layer.cache.mark(own), has_mask, out[:, None], top_k_index_BK
            )
            for layer, own, opened, out, top_k_index_BK in zip(
                layers, cache_layers, cached, outs, routings, strict=True
            )
        ]
        for i in range(1, len(answers)):
            self._answers.put(number + i, answers[i - 1].out, answers[i])
        return self._enter(number, answers[0])

    def _reach(
        self, number: int, x: Tensor, kwargs: dict[str, Any]
    ) -> tuple[list[Residents], list[Any]]:
        """Return the experts and parts of the cache of the layers that one call can compute."""
        residents: list[Residents] = []
        cache_layers: list[Any] = []
        if x.is_inference() or torch.is_inference_mode_enabled():  # a change would not be noticed
            return residents, cache_layers
        first = self._layers[number]
        angles = first.angles
        for layer in self._layers[number : number + 1 if has_hooks(first.layer) else None]:
            angles = angles or layer.angles
            joins = not residents or (layer.may_follow(x) and layer.angles in (None, angles))
            experts = layer.residents() if joins else None
            cache_layer = None if experts is None else layer.cache_layer(x, kwargs)
            if experts is None or cache_layer is None:
                break
            if not residents:  # of all layers at once, which is faster than one by one
                are_as_loaded = self._state is not None and self._state.change() is None
                if hides_nothing(kwargs.get(MASK)):  # those that follow may have other lengths
                    kwargs = kwargs | {MASK: None}
            if not are_as_loaded and any(layer.changes()):
                break
            residents.append(experts)
            cache_layers.append(cache_layer)
        return residents, cache_layers

    def _enter(self, number: int, answer: _Answer) -> Tensor:
        """Return an answer, and let cache and engine know that its layer was computed."""
        self._layers[number].note(answer.top_k_index_BK)
        self._layers[number].cache.add_token(answer.cache_layer, answer.cached)
        return answer.out
