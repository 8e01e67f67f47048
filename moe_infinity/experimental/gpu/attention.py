"""Attention of decode steps on a GPU, by kernels that read keys and values where they are cached.

transformers lets a model's attention be any function of a name. In decode steps it is ours; prompts
are computed as ever. Whether that gives what the model's own code gives is found by trying, when
the model is loaded: a prompt of two sequences, one of them padded, and two steps after it.

Private names of transformers used here: `_attn_implementation_internal` of configs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_utils import AttentionInterface

from moe_infinity.architectures.attention_inputs import cache_parameter
from moe_infinity.architectures.trial import Differs, Verdict, verdict
from moe_infinity.errors import ConfigError
from moe_infinity.experimental.gpu.cached_step import NAME, Place

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
