"""The memory that a forward pass needs beside the weights: keys and values, and activations. The
sizes are read from transformers' config, by the names that it has for them.

T tokens in a pass, S tokens that they look at, D model width, K experts per token, F expert width,
A width of the queries of all heads, W of a token's keys and values in one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_infinity.kernels.kv_rows import SCALE_BYTES
from moe_infinity.memory.part_bytes import PartBytes
from moe_infinity.sizes import format_bytes

NO_KEYS = ("linear_attention", "mamba", "conv", "moe", "mlp")  # layers that keep no token
ITEM_BYTES = 2  # bfloat16 or float16; float32 models are small
FLOAT32_BYTES = 4
# Of what the formula says: it leaves out what is freed late, and pieces of heaps between what is in
# use. Measured with the widths of Qwen3-30B-A3B in bfloat16: 330 KiB a token of 500, 192 of 2,500,
# where it says 204, or 255 with this.
SAFETY = 1.25
WAITING_COPIES = 2  # of a token's hidden states: what the first layer was given, and another
MASK_BYTES = 2  # of a pair, while it is made; 3 with a window, before layers compute
# From the start memory is left for a pass of USUAL_TOKENS that nothing came before, and for the
# keys and values of USUAL_CONTEXT tokens. A step that needs more gets it from slots.
USUAL_TOKENS = 512
USUAL_CONTEXT = 4096


class Widths(NamedTuple):
    """Numbers of one layer of a token."""

    model: int
    queries: int
    heads: int
    keys: int  # and values
    rows: int  # that these are, each of which may have a scale


@dataclass(frozen=True, slots=True)
class KvBytes:
    """The bytes of the KV cache of one sequence."""

    per_token: int  # of layers that keep all tokens
    per_window_token: int  # of layers that keep the last `window` tokens
    window: int
    dtype: str = "auto"  # the kv_dtype

    def __str__(self) -> str:
        windows = f" and {format_bytes(self.per_window_token)} a token of the last {self.window:,}"
        return (
            f"{'as the model' if self.dtype == 'auto' else self.dtype}, "
            f"{format_bytes(self.per_token)} a token{windows if self.per_window_token else ''}"
        )

    def of(self, num_tokens: int) -> int:
        in_window = min(num_tokens, self.window)
        return self.per_token * num_tokens + self.per_window_token * in_window


def kv_bytes_of(config: Any, item_bytes: int = ITEM_BYTES, kv_dtype: str = "auto") -> KvBytes:
    """Return the bytes of the KV cache of numbers of so many bytes, or packed by `kv_dtype`."""
    config = config.get_text_config(decoder=True)
    window = number_of(config, "sliding_window") or number_of(config, "attention_chunk_size")
    usual = "sliding_attention" if window else "full_attention"  # as transformers' caches do
    types = getattr(config, "layer_types", None)
    types = types or [usual] * number_of(config, "num_hidden_layers")
    layers = [config] * len(types)
    if hasattr(config, "num_hidden_layers"):  # not of every class: transformers counts by it
        layers = getattr(config, "per_layer_config", None) or layers
    kept = {False: 0, True: 0}  # by whether a window is all that a layer keeps
    for kind, layer in zip(types, layers, strict=False):
        if kind not in NO_KEYS:
            widths = _widths(layer)
            packed = widths.keys + widths.rows * SCALE_BYTES
            is_window = "sliding" in kind or "chunked" in kind
            kept[is_window] += widths.keys * item_bytes if kv_dtype == "auto" else packed
    return KvBytes(kept[False], kept[True], window, kv_dtype)


def _widths(config: Any) -> Widths:
    model = number_of(config, "hidden_size")
    heads = number_of(config, "num_attention_heads") or 1
    head_dim = number_of(config, "head_dim") or model // heads
    kv_heads = number_of(config, "num_key_value_heads") or heads
    latent = number_of(config, "kv_lora_rank")
    if latent:  # the cache has latents, which all heads share
        rotated = number_of(config, "qk_rope_head_dim")
        head_dim = rotated + number_of(config, "qk_nope_head_dim") + number_of(config, "v_head_dim")
        return Widths(model, heads * head_dim, heads, latent + rotated, 2)
    return Widths(model, heads * head_dim, heads, 2 * kv_heads * head_dim, 2 * kv_heads)


def number_of(config: Any, name: str) -> int:
    """Return a number of the config, the largest if layers have their own; 0 if it has none."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers names none where layers differ
        value = [getattr(layer, name, None) for layer in config.per_layer_config]
    return max(map(int, filter(None, value)), default=0) if isinstance(value, list) else value or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """An estimate of the bytes that a pass allocates for a while."""

    kv: KvBytes
    per_token: int
    per_part: int  # of a token in the hungriest part of a layer, beside what parts hand on
    per_waiting: int  # of a token while another block of the prompt computes
    per_context: int  # of a token that is looked at: while a layer attends, it is unpacked
    per_earlier: int  # of one that a prompt's pass finds: its keys and values, for each query head
    per_pair: int  # of a token and one that it looks at
    is_causal: bool  # a pass that nothing came before needs nothing by pair
    logits: int
    least: int  # of a prompt's pass beside these

    @classmethod
    def of(
        cls, config: Any, *, top_k: int, expert_params: int, item_bytes: int, kv_dtype: str,
        is_exact: bool, part: PartBytes,
    ) -> StepBytes:  # fmt: skip
        """For each of a token's experts there is its output in float32 or, where torch computes,
        its input, its output and what is between. `part` is the hungriest of the other parts of a
        layer, which compute before experts do. Attention makes a mask; where the module's own
        code attends (`is_exact`), also numbers of it and keys and values for each query head or,
        where it is not fused, all scores. Torch fuses none whose values are narrower than its keys.
        """
        text = config.get_text_config(decoder=True)
        widths = _widths(text)
        both = FLOAT32_BYTES + item_bytes  # our kernels take a copy in float32
        width = expert_params // (3 * max(widths.model, 1))  # without a gate it is 2 F / 3
        experts = 2 * item_bytes * top_k * (widths.model + 2 * width)
        rest = both * (3 * widths.model + 2 * widths.queries + widths.keys)
        hungriest = max(experts, part.per_token)
        latent = number_of(text, "kv_lora_rank")
        repeated = widths.queries if is_exact or latent else 0
        is_fused = config._attn_implementation not in (None, "eager") and not (latent and is_exact)
        return cls(
            kv=kv_bytes_of(config, item_bytes, kv_dtype),
            per_token=int(SAFETY * (hungriest + rest)),
            per_part=int(SAFETY * max(hungriest, rest)),
            per_waiting=int(SAFETY * WAITING_COPIES * item_bytes * widths.model),
            per_context=0 if kv_dtype == "auto" else both * widths.keys,
            per_earlier=int(SAFETY * item_bytes * (widths.keys + 2 * repeated)),
            per_pair=(both if is_exact else MASK_BYTES) if is_fused else 2 * both * widths.heads,
            is_causal=is_fused and not number_of(text, "sliding_window"),
            logits=FLOAT32_BYTES * number_of(text, "vocab_size"),
            least=int(SAFETY * part.least),
        )

    def of_pass(self, num_tokens: int, context: int, block: int | None = None) -> int:
        """The bytes of so many tokens of a prompt that look at `context` tokens, of which they are
        the last; without their keys and values. In a layer `block` of them compute at once.
        """
        at_once = min(num_tokens, block or num_tokens)
        num_waiting = num_tokens - at_once
        waiting = num_waiting * self.per_waiting
        if num_waiting and not (self.is_causal and num_tokens == context):  # it makes masks of all
            waiting += num_tokens * context * MASK_BYTES
        of_earlier = self.per_earlier * max(context - at_once, 0)
        return waiting + of_earlier + max(self.of_decode_step(at_once, context), self.least)

    def of_decode_step(self, num_tokens: int, context: int) -> int:
        """The same for tokens that are each the next of an answer. Kernels compute their attention,
        which repeat no keys; where the module does, as with exact=True, nothing is counted for it.
        """
        pairs = 0 if self.is_causal and num_tokens == context else num_tokens * context
        own = num_tokens * self.per_token + context * self.per_context
        return self.logits + own + pairs * self.per_pair

    def from_the_start(self) -> int:
        """The bytes that are kept free of experts from the start."""
        return self.of_pass(USUAL_TOKENS, USUAL_TOKENS) + self.kv.of(USUAL_CONTEXT)
