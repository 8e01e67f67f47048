"""A long prompt goes through each decoder layer a block of tokens after another.

    layer 0    block 0, block 1, ... of the prompt
    layer 1    block 0, block 1, ...

So an absent expert is read once for all tokens of a layer, however many they are, and what a layer
allocates is bounded by a block. The layer's own code runs, as it would in a pass over a part of the
prompt: the cache has the keys and values of the blocks before, and each argument that has a row for
every token is cut.

Whether a model can be cut like this is tried with its own code, before its first long prompt:
without experts, a short text has to give the same as a whole and in two blocks.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.utils import output_capturing

from moe_infinity.architectures.adapters import ExpertsModule
from moe_infinity.architectures.attention_inputs import (
    MASK,
    cache_in,
    cache_parameter,
    keeps_nothing,
    version_of,
)
from moe_infinity.architectures.module_state import (
    ModuleState,
    has_hooks,
    is_stock,
    is_watched,
    replace_forward,
    stock_forward,
)
from moe_infinity.architectures.trial import Differs, FellBack, Found, Verdict, verdict
from moe_infinity.kernels.kv_layers import PACKED, PLAIN, new_cache

logger = logging.getLogger(__name__)

# Parts of caches of which it is known how many keys a layer gets.
KNOWN = {LinearAttentionLayer, *PACKED, *PACKED.values(), *PLAIN.values()}
TRIAL_TOKENS = 144  # in two blocks, which kernels for prompts compute
TRIAL_TOLERANCE = 0.05  # of the norm of a token's hidden states
MOST_TRIALS = 3  # of a model whose modules change all the time


class PromptBlock(NamedTuple):
    """Neighbouring tokens of a pass, in one decoder layer."""

    start: int
    stop: int
    num_tokens: int  # of the pass

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def is_last(self) -> bool:
        return self.stop == self.num_tokens


class PromptBlocks:
    """The blocks of tokens that the decoder layers of one model take."""

    def __init__(
        self, model: Any, layers: Sequence[ExpertsModule], lock: RLock, kv_dtype: str
    ) -> None:
        # Tokens of a block, at most, in the prompt that began last; None: it is not cut.
        self.size: int | None = None
        self.most: int | None = None  # fewer, for as long as others wait for each block
        self.current: PromptBlock | None = None  # that a decoder layer computes
        self.is_trying = False  # experts give anything that depends on each token alone
        self._model = model
        self._experts = {layer.module for layer in layers}
        self._lock = lock
        self._kv_dtype = kv_dtype
        self._decoder: Any = None
        self._layers: Sequence[nn.Module] = ()
        self._state: ModuleState | None = None  # of the layers, as they were tried
        self._verdict: Verdict[None] = FellBack("it was not tried yet")
        self._num_tried = 0
        self._num_cut = 0  # calls of layers that were cut
        self._looks_ahead: Any = WeakIdKeyDictionary()  # by mask
        self.make_room: Callable[[int], object] = lambda num_tokens: None  # to take all at once
        self._given: ref[Tensor] | None = None  # what a layer gave last

    def connect(self) -> None:
        """Let the decoder layers of the model take blocks, and the norm behind them."""
        self._decoder, self._layers = _decoder_of(self._model, self._experts)
        for layer in self._layers:
            replace_forward(layer, partial(self._forward, layer, stock_forward(layer)))
        self._forward_of_decoder = vars(self._decoder).get("forward") if self._layers else None
        behind = [] if self._decoder is None else self._decoder.children()
        for norm in [module for module in behind if "norm" in type(module).__name__.lower()]:
            replace_forward(norm, partial(self._norm, stock_forward(norm)))

    def are_usable(self) -> bool:
        """Return True if the model computes the same in blocks, and nothing watches the modules of
        its layers, which would see them. It is tried when it is asked for, and again when a module
        was changed.
        """
        modules = [m for part in self._layers for m in part.modules()]
        if not modules or is_watched() or any(map(has_hooks, modules)):
            return False
        if self._state is None or self._state.change() is not None:
            around = [self._decoder, *self._decoder.children()]
            if self._num_tried >= MOST_TRIALS or any(map(has_hooks, around)):
                return False
            self._num_tried += 1
            self._verdict = verdict(self._try)
            self._state = ModuleState(modules)
            if isinstance(self._verdict, FellBack):
                logger.info("no long prompt goes in blocks: %s", self._verdict.reason)
        return isinstance(self._verdict, Found)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside, other passes may run. The one under way goes on afterwards."""
        kept = self.size, self.current
        self.current = None
        try:
            yield
        finally:
            self.size, self.current = kept

    def _forward(
        self, layer: nn.Module, stock: Callable[..., Any], *given: Any, **kwargs: Any
    ) -> Any:
        """Compute what the layer's own forward method would."""
        if not given or not isinstance(given[0], Tensor) or given[0].dim() != 3:
            return stock(*given, **kwargs)
        hidden_states, *args = given
        blocks = _blocks(hidden_states.shape[1], self.size_now)
        if len(blocks) < 2:
            return stock(*given, **kwargs)
        cache_layer = _cache_layer(layer, kwargs)
        if cache_layer is None or not self._can_cut(blocks, layer, cache_layer, given, kwargs):
            self.size = None
            self.make_room(len(hidden_states) * hidden_states.shape[1])
            return stock(*given, **kwargs)
        self._num_cut += 1
        # What a layer gave is the next one's alone, so that a block may take its input's place.
        is_own = self._given is not None and self._given() is hidden_states
        is_own = is_own and self._may_replace and layer is not self._layers[0]
        out = hidden_states if is_own else torch.empty_like(hidden_states)
        self._given = ref(out)
        try:
            for block in blocks:
                self.current = block
                cut = partial(_cut, block, cache_layer)
                part = stock(
                    hidden_states[:, block.tokens],
                    *(cut("", value) for value in args),
                    **{name: cut(name, value) for name, value in kwargs.items()},
                )
                if not isinstance(part, Tensor):
                    raise Differs(f"a layer returns {type(part).__name__}, not a tensor")
                if part.dtype != out.dtype:
                    raise Differs(f"a layer makes {part.dtype} of {out.dtype}")
                out[:, block.tokens] = part
        finally:
            self.current = None
        return out

    @property
    def size_now(self) -> int | None:
        """Tokens of a block of the next layer, at most; None: the prompt is not cut."""
        return None if self.size is None else min(self.size, self.most or self.size)

    @property
    def _may_replace(self) -> bool:
        """True for a decoder of transformers: code of others may keep what a layer gave."""
        is_own = vars(self._decoder).get("forward") is self._forward_of_decoder
        kind = type(self._decoder)
        return is_own and kind.__module__.startswith("transformers.") and is_stock(kind.forward)

    def _can_cut(
        self,
        blocks: Sequence[PromptBlock],
        layer: nn.Module,
        cache_layer: Any,
        given: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> bool:
        """Return True for arguments of which each block gets its part."""
        if len(given[0]) > 1 or torch.is_grad_enabled():
            return False
        if output_capturing._active_collector.get():
            return False
        if kwargs.get(MASK) is None and not _is_causal(layer, kwargs):
            return False
        window = getattr(cache_layer, "sliding_window", None)
        if kwargs.get(MASK) is None and window is not None and blocks[0].num_tokens > window:
            return False  # the cache would leave what nothing hides
        for value in filter(torch.is_tensor, (*given[1:], *kwargs.values())):
            known = {} if value.is_inference() else self._looks_ahead.setdefault(value, {})
            key = len(blocks), version_of(value)
            if key not in known:
                known[key] = _shows_later(blocks, value)
            if known[key]:
                return False
        return True

    def _norm(self, stock: Callable[..., Any], *given: Any, **kwargs: Any) -> Any:
        """Compute what a norm of hidden states would, which makes float32 of all it is given."""
        x = given[0] if given else None
        is_plain = isinstance(x, Tensor) and x.dim() == 3 and len(given) == 1 and not kwargs
        if x is None or not is_plain or len(x) > 1 or torch.is_grad_enabled():
            return stock(*given, **kwargs)
        blocks = _blocks(x.shape[1], self.size_now)
        if len(blocks) < 2:
            return stock(x)
        return torch.cat([stock(x[:, block.tokens]) for block in blocks], dim=1)

    def _try(self) -> None:
        """Raises Differs if the model gives something else in blocks."""
        if any(len(self._experts & {*layer.modules()}) > 1 for layer in self._layers):
            raise Differs("a layer has two groups of experts")
        vocab_size = self._model.config.get_text_config(decoder=True).vocab_size
        ids = torch.arange(TRIAL_TOKENS, device="cpu")[None] * 5 % vocab_size
        with self._lock, self.set_aside():
            self.is_trying = True
            try:
                whole = self._hidden_states(ids, None)
                self._num_cut = 0
                cut = self._hidden_states(ids, TRIAL_TOKENS // 2)
            finally:
                self.is_trying = False
        if self._num_cut != len(self._layers):
            raise Differs(f"{self._num_cut} of {len(self._layers)} layers can be given blocks")
        difference = float(((cut - whole).norm(dim=-1) / whole.norm(dim=-1)).max())
        if not difference <= TRIAL_TOLERANCE:
            raise Differs(f"hidden states of a token differ by {difference:.2g} of their norm")

    def _hidden_states(self, ids: Tensor, size: int | None) -> Tensor:
        self.size = size
        cache = new_cache(self._model.config, self._kv_dtype)
        given = {cache_parameter(self._decoder.forward): cache, "use_cache": True}
        given[MASK] = torch.ones_like(ids)
        states: Tensor = self._decoder(input_ids=ids, return_dict=True, **given).last_hidden_state
        return states.float()


def _decoder_of(model: Any, experts: Set[nn.Module]) -> tuple[Any, Sequence[nn.Module]]:
    """The part of a model that has decoder layers in a list, with these modules of experts, and the
    layers. There are none if it has an encoder.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in [] if model.config.is_encoder_decoder else parts:
        for child in part.children():
            has_experts = not experts.isdisjoint(child.modules())
            if part is not model and isinstance(child, nn.ModuleList) and has_experts:
                return part, [*child]
    return None, ()


def _cache_layer(layer: nn.Module, kwargs: dict[str, Any]) -> Any:
    """The layer's part of the cache among its arguments; None if there is none that is known."""
    cache = cache_in(kwargs)
    own, *inner = layer.modules()  # its attention knows better, if it is one of two
    numbers = (vars(module).get("layer_idx") for module in [*inner, own])
    number = next((n for n in numbers if n is not None), None)
    layers = getattr(cache, "layers", ())
    if number is None or number >= len(layers):
        return None
    is_known = type(layers[number]) in KNOWN or keeps_nothing(layers[number])
    return layers[number] if is_known else None


def _blocks(num_tokens: int, size: int | None) -> list[PromptBlock]:
    """Blocks that are about equally long."""
    num_blocks = 1 if size is None else max(-(-num_tokens // size), 1)
    length = -(-num_tokens // num_blocks)
    starts = range(0, num_tokens, max(length, 1))
    return [PromptBlock(at, min(at + length, num_tokens), num_tokens) for at in starts]


def _is_causal(layer: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return True if a token looks at none behind it where there is no mask."""
    says = [vars(module).get("is_causal", True) for module in layer.modules()]
    return all(says) and kwargs.get("is_causal", True) is not False


def _is_mask(value: Any, num_tokens: int) -> bool:
    """Return True for [B, 1 or H, T, N], which is added, or True where a token looks at a key."""
    is_wide = isinstance(value, Tensor) and value.dim() == 4
    return is_wide and bool(value.shape[2] == num_tokens <= value.shape[3])


def _shows_later(blocks: Sequence[PromptBlock], value: Tensor) -> bool:
    """Return True for a mask by which a token looks at one of a later block, as those of an image
    do in some models.
    """
    num_tokens = blocks[0].num_tokens
    if value.shape == (num_tokens, num_tokens):  # it might be anything
        return True
    if not _is_mask(value, num_tokens):
        return False
    num_before = value.shape[3] - num_tokens
    later = (value[:, :, block.tokens, num_before + block.stop :] for block in blocks[:-1])
    if value.dtype == torch.bool:
        return any(bool(part.any()) for part in later)
    if not value.is_floating_point():
        return True
    return any(bool((part > torch.finfo(value.dtype).min / 2).any()) for part in later)


def _num_keys(cache_layer: Any, num_new: int) -> int:
    """The keys that a layer gets of its cache with so many new tokens. A window that keeps more
    than it needs gives all or a window of them: the versions of transformers differ, so it is asked
    with keys of one number.
    """
    kept = getattr(cache_layer, "keys", None)
    if not isinstance(kept, Tensor) or not kept.numel():
        return num_new
    if not getattr(cache_layer, "record_past", False):
        return num_new + kept.shape[-2]
    thin = copy.copy(cache_layer)
    thin.keys = thin.values = kept[:1, :1, :, :1]
    new = kept.new_zeros(1, 1, num_new, 1)
    keys, _ = DynamicSlidingWindowLayer.update(thin, new, new)
    return int(keys.shape[-2])


def _cut(block: PromptBlock, cache_layer: Any, name: str, value: Any) -> Any:
    """The part of a layer's argument that belongs to a block of tokens: of a mask the rows of these
    tokens and the columns of the keys that the layer gets by then.
    """
    if isinstance(value, tuple):
        return tuple(_cut(block, cache_layer, "", each) for each in value)
    num_tokens = block.stop - block.start
    num_keys = _num_keys(cache_layer, num_tokens)
    if value is None and name == MASK and block.start and isinstance(cache_layer, DynamicLayer):
        mask = torch.ones(num_tokens, num_keys, dtype=torch.bool, device="cpu")
        return mask.tril_(num_keys - num_tokens)[None, None]
    if not isinstance(value, Tensor):
        return value
    if _is_mask(value, block.num_tokens):
        end = value.shape[3] - block.num_tokens + block.stop
        return value[:, :, block.tokens, end - num_keys : end]
    places = [dim for dim in (1, 2, 0) if dim < value.dim()]
    dim = next((dim for dim in places if value.shape[dim] == block.num_tokens), None)
    return value if dim is None else value.narrow(dim, block.start, num_tokens)
