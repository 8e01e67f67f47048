"""The keys and values of a decode step on a GPU: one more token of each sequence in transformers'
dynamic cache, whose layers have room for it (architectures/attention_inputs.py).

Kernels find them through a table on the device, which the host writes before each step. So a graph
of a step depends neither on how long the cache is, nor on where it lies, nor on whose it is.

Legend: L layers, B sequences, N tokens with the new one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer
from transformers.modeling_utils import AttentionInterface

from moe_infinity.architectures import attention_inputs
from moe_infinity.architectures.attention_inputs import cache_parameter
from moe_infinity.architectures.trial import Differs, Verdict, verdict
from moe_infinity.errors import ConfigError
from moe_infinity.gpu.kernels import Kernels
from moe_infinity.gpu.kernels.descriptions import CachedLayer
from moe_infinity.kernels.triton.slot_mlp import LOAD_BYTES

NAME = "_moe_infinity_place"  # an attribute of cache layers and of new keys, in a step


class Place(NamedTuple):
    """Where one layer has the new token of each sequence."""

    numbers: Tensor  # int64, a CachedLayer, on the device
    kernels: Kernels


class CannotBeCaptured(RuntimeError):
    """A graph would keep a number that changes from step to step."""


class CachedSteps:
    """The caches of one model, one step at a time."""

    def __init__(self, device: torch.device, kernels: Kernels) -> None:
        self._device = device
        self._kernels = kernels
        self._table_LN = torch.empty(0, 0, dtype=torch.int64, device=device)

    def of(self, cache: Any, num_seqs: int, mask_BN: Tensor | None) -> CachedStep | None:
        """A step that adds a token to each sequence. None for caches that kernels do not know.
        `mask_BN`: 0 for tokens that are not looked at, the new one with them.
        """
        if type(cache) is not DynamicCache or cache.offloading:
            return None
        if not all(map(_is_known, cache.layers)):
            return None
        growing = [layer for layer in cache.layers if attention_inputs.can_grow(layer)]
        if not growing or any(len(layer.keys) != num_seqs for layer in growing):
            return None
        if mask_BN is not None:
            mask_BN = mask_BN.to(torch.uint8).contiguous()
        rooms = [attention_inputs.with_room(layer) for layer in growing]
        lengths = [keys.shape[2] for keys, _ in rooms]
        if mask_BN is not None and max(lengths) > mask_BN.shape[1]:
            return None
        rows = [_numbers(*room, mask_BN) for room in rooms]
        if not all(map(_is_aligned, rooms)):
            return None
        self._upload(rows)
        places = [Place(numbers, self._kernels) for numbers in self._table_LN.unbind()]
        return CachedStep(growing, places, mask_BN, _states_of(cache.layers))

    def _upload(self, rows: Sequence[CachedLayer]) -> None:
        """The copy does not wait: pinned memory is not used again before it has been read."""
        is_pinned = self._device.type == "cuda"
        host_LN = torch.tensor(rows, dtype=torch.int64, device="cpu", pin_memory=is_pinned)
        if self._table_LN.shape != host_LN.shape:
            self._table_LN = torch.empty(host_LN.shape, dtype=torch.int64, device=self._device)
        self._table_LN.copy_(host_LN, non_blocking=True)


class CachedStep:
    """A step, from the room for its token to the token in the cache."""

    def __init__(
        self, layers: Sequence[Any], places: Sequence[Place], mask: Tensor | None, states: list[int]
    ) -> None:
        self._layers = layers
        self._places = places
        self._mask = mask  # kept, as the table has its address
        self.states = states  # addresses of what layers change in place, without a table

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Inside, layers that are given new keys pass them on, for kernels to attend with."""
        try:
            for layer, place in zip(self._layers, self._places, strict=True):
                vars(layer).update({NAME: place, "update": partial(_pass_on, place)})
            yield
        finally:
            for layer in self._layers:
                for name in (NAME, "update"):
                    vars(layer).pop(name, None)

    @contextmanager
    def without_lengths(self) -> Iterator[None]:
        """Inside, whoever asks how long the cache is gets CannotBeCaptured."""
        names = "get_seq_length", "get_mask_sizes"
        try:
            for layer in self._layers:
                vars(layer).update(dict.fromkeys(names, _refuse))
            yield
        finally:
            for layer in self._layers:
                for name in names:
                    vars(layer).pop(name, None)

    def take(self) -> None:
        """The step has run: its token belongs to the cache."""
        for layer in self._layers:
            attention_inputs.add_token(layer)


def _is_known(layer: Any) -> bool:
    return (
        attention_inputs.can_grow(layer)
        or attention_inputs.keeps_nothing(layer)
        or type(layer) is LinearAttentionLayer
    )


def _states_of(layers: Sequence[Any]) -> list[int]:
    recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
    states = [s for layer in recurrent for s in (layer.conv_states, layer.recurrent_states)]
    return [state.data_ptr() for by_idx in states for state in by_idx.values() if state is not None]


def _is_aligned(room: tuple[Tensor, Tensor]) -> bool:
    """True if kernels can load 16 bytes at once of each row."""
    at = (n for t in room for n in (t.data_ptr(), *(t.itemsize * step for step in t.stride()[:2])))
    return not any(number % LOAD_BYTES for number in at)


def _numbers(keys: Tensor, values: Tensor, mask_BN: Tensor | None) -> CachedLayer:
    num_tokens = keys.shape[2]
    assert keys.stride()[2:] == (keys.shape[3], 1), keys.stride()
    assert values.stride()[2:] == (values.shape[3], 1), values.stride()
    mask = 0
    if mask_BN is not None:
        mask = mask_BN.data_ptr() + mask_BN.shape[1] - num_tokens
    return CachedLayer(
        keys=keys.data_ptr(),
        values=values.data_ptr(),
        key_seq=keys.stride(0),
        key_head=keys.stride(1),
        value_seq=values.stride(0),
        value_head=values.stride(1),
        num_tokens=num_tokens,
        mask=mask,
        mask_seq=0 if mask_BN is None else mask_BN.shape[1],
    )


def _pass_on(
    place: Place, keys: Tensor, values: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    """In place of a layer's update(): attention writes the cache."""
    setattr(keys, NAME, place)
    return keys, values


def _refuse(*_: Any, **__: Any) -> Any:
    raise CannotBeCaptured("the model asks how long the cache is")


ATTENTION = "moe_infinity"  # the name of our attention in transformers
IMPLEMENTATION = "_attn_implementation_internal"
EXPAND = "expand_kv"  # what modules with latents have: DeepSeek-V2 and those like it

TRIED_TOKENS = 6  # of a prompt; more if there is a window that they would not leave
MOST_TRIED_TOKENS = 1024
TRIED_STEPS = 2
# Of the logits' norm. A key that is not looked at, or is looked at in vain, changes more: a window
# that is one token off changes it by 0.11. Rounding changed tiny random models by up to 0.04.
TOLERANCES = {torch.float32: 1e-4}
TOLERANCE = 0.1  # of numbers that are rounded to 8 or 11 bits


def attend_cached(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """[B, H, 1, d], [B, G, 1, d], [B, G, 1, v] -> [B, 1, H, v]: what transformers calls in place of
    a model's attention. The new keys know their place.
    """
    place: Place | None = getattr(key, NAME, None)
    if place is None or query.shape[2] != 1:
        raise ConfigError("attention over something else than a decode step's cache")
    given = query[:, :, 0], key[:, :, 0], value[:, :, 0]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if hasattr(module, EXPAND):
        return _attend_latent(module, *given, place, scale)[:, None], None
    out_BHv = place.kernels.attend(
        *given, place.numbers, s_aux, scale=scale, window=sliding_window, softcap=softcap
    )
    return out_BHv[:, None], None


def _attend_latent(
    module: Any,
    query_BHd: Tensor,
    latent_B1r: Tensor,
    rotated_B1p: Tensor,
    place: Place,
    scale: float,
) -> Tensor:
    """Multi-head latent attention over the latents themselves: the weights that would expand them
    are multiplied with the queries, and with what is looked at.

    Legend: d = n + p width of a query, p of it rotated; r width of a latent, v of a value.
    """
    width = module.qk_nope_head_dim
    expand_Hor = module.kv_b_proj.weight.view(query_BHd.shape[1], -1, latent_B1r.shape[2])
    query_HBr = query_BHd[..., :width].transpose(0, 1) @ expand_Hor[:, :width]
    sum_BHr: Tensor = place.kernels.attend_latent(
        query_HBr.transpose(0, 1),
        query_BHd[..., width:],
        latent_B1r[:, 0],
        rotated_B1p[:, 0],
        place.numbers,
        scale=scale,
    )
    out_HBv: Tensor = sum_BHr.transpose(0, 1) @ expand_Hor[:, width:].mT
    return out_HBv.transpose(0, 1)


class AttentionSwitch:
    """Which attention a model calls: its own, or another."""

    def __init__(self, model: nn.Module) -> None:
        AttentionInterface.register(ATTENTION, attend_cached)
        self._latent = [module for module in model.modules() if hasattr(module, EXPAND)]
        found = (getattr(module, "config", None) for module in model.modules())
        configs = {id(config): config for config in found if hasattr(config, IMPLEMENTATION)}
        self._configs: Sequence[Any] = list(configs.values())

    @contextmanager
    def to(self, name: str = ATTENTION) -> Iterator[None]:
        """Inside, the model calls the one of this name in transformers."""
        stock = [getattr(config, IMPLEMENTATION) for config in self._configs]
        try:
            for config in self._configs:
                setattr(config, IMPLEMENTATION, name)
            for module in self._latent:
                vars(module)[EXPAND] = _as_they_are
            yield
        finally:
            for module in self._latent:
                vars(module).pop(EXPAND, None)
            for config, own in zip(self._configs, stock, strict=True):
                setattr(config, IMPLEMENTATION, own)


def _as_they_are(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In place of what expands latents to the keys and values of all heads."""
    return latent, rotated


def try_steps(model: Any, step: Callable[..., Any]) -> Verdict[Callable[..., Any]]:
    """Find out whether `step`, called as the model is, gives logits of decode steps as the model's
    own forward does.
    """
    return verdict(lambda: _tried(model, step))


def _tried(model: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    text = model.config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None) or 0
    num_tokens = max(TRIED_TOKENS, window + 1 if window < MOST_TRIED_TOKENS else 0)
    whole = torch.arange(2 * (num_tokens + TRIED_STEPS), device=model.device)
    ids_BN = (whole * 7 % min(text.vocab_size, 97)).view(2, -1)
    mask_BN = torch.ones_like(ids_BN)
    mask_BN[0, : num_tokens // 2] = 0
    positions_BN = (mask_BN.cumsum(1) - 1).clamp(min=0)

    def inputs(tokens: slice) -> dict[str, Any]:
        given = {"input_ids": ids_BN[:, tokens], "position_ids": positions_BN[:, tokens]}
        return given | {"attention_mask": mask_BN[:, : tokens.stop], "use_cache": True}

    cache = DynamicCache(config=text)
    name = cache_parameter(model.forward)
    model.forward(**{name: cache}, **inputs(slice(0, num_tokens)))
    ours = copy.deepcopy(cache)
    for at in range(num_tokens, num_tokens + TRIED_STEPS):
        given = inputs(slice(at, at + 1))
        found = step(**{name: ours}, **given).logits.float()
        wanted = model.forward(**{name: cache}, **given).logits.float()
        tolerance = TOLERANCES.get(model.dtype, TOLERANCE)
        if not bool((found - wanted).norm() <= tolerance * wanted.norm()):
            raise Differs("attention by kernels gives other logits")
    if int(ours.get_seq_length()) != num_tokens + TRIED_STEPS:
        raise Differs("a decode step does not take its token into the cache")
    return step
