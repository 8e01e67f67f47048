"""The sizes of a model that decide how fast it runs, from its config and headers."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from moe_infinity.checkpoint.loading import plan_from_headers
from moe_infinity.checkpoint.plan import Plan, stored_bytes
from moe_infinity.errors import UnsupportedModelError
from moe_infinity.inspection import find_local
from moe_infinity.tools.planning.remote import hollow_copy

EMBEDDING = re.compile(r"(embed_tokens|embed_in|token_embd|tok_embeddings|word_embeddings|wte)\.")
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.")
KV_ITEM_BYTES = 2  # bfloat16 or float16; float32 models are small
NO_KEYS = ("linear_attention", "mamba", "conv")  # layers whose state does not grow


@dataclass(frozen=True, slots=True)
class KvBytes:
    """Of the KV cache of one sequence."""

    per_token: int  # of layers that keep all tokens
    per_window_token: int  # of layers that keep the last `window` tokens
    window: int

    def of(self, num_tokens: int) -> int:
        in_window = min(num_tokens, self.window)
        return self.per_token * num_tokens + self.per_window_token * in_window


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Expert bytes are of one expert of one MoE layer."""

    model: str
    architecture: str
    place: Path | None  # the folder with its files; None: it is not on this machine
    num_layers: int  # MoE layers
    num_experts: int  # of a layer
    top_k: int
    packing: str | None
    slot_bytes: int
    stored_bytes: int  # read from the disk for a load
    expert_params: int
    dense_bytes: int
    step_dense_bytes: int  # what a decode step reads of them: all but the input embeddings
    dense_params: int  # that multiply every token; without embeddings and head
    head_params: int
    kv: KvBytes

    @property
    def total_experts(self) -> int:
        return self.num_layers * self.num_experts

    @property
    def expert_bytes(self) -> int:
        """Of all experts, in slots."""
        return self.total_experts * self.slot_bytes

    @property
    def activated_params(self) -> int:
        """Parameters that a token uses."""
        experts = self.num_layers * self.top_k * self.expert_params
        return self.dense_params + self.head_params + experts

    @property
    def weight_bits(self) -> float:
        """Of a parameter of an expert, on disk."""
        return 8 * self.stored_bytes / self.expert_params

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        place = None if self.place is None else str(self.place)
        return asdict(self) | {"place": place, "activated_params": self.activated_params}


def sizes_of(model: str) -> ModelSizes:
    """Of a folder, GGUF file or hub id; of one that is not on this machine only headers are read
    from the hub. Raises CheckpointError, UnsupportedModelError, and what `hollow_copy` raises.
    """
    found = find_local(model)
    is_named = model.startswith((".", "/", "~")) or Path(model).exists()
    if found is None or (found == model and not is_named):
        with hollow_copy(model) as path:
            return _sizes(model, plan_from_headers(str(path), dtype="auto"), None)
    plan = plan_from_headers(found, dtype="auto")
    place = Path(found).expanduser()
    return _sizes(model, plan, place if place.is_dir() else place.parent)


def _sizes(model: str, plan: Plan, place: Path | None) -> ModelSizes:
    if plan.top_k is None:
        raise UnsupportedModelError(
            f"{model}: its config does not say how many experts a token uses, so nothing can be "
            "planned\nhint: `moe-infinity inspect` shows its sizes"
        )
    embedding = {name: w for name, w in plan.dense.items() if EMBEDDING.search(name)}
    head = {name: w for name, w in plan.dense.items() if HEAD.search(name)}
    unread = stored_bytes(embedding.values()) if head else 0
    others = [w for name, w in plan.dense.items() if name not in embedding and name not in head]
    return ModelSizes(
        model=model,
        architecture=plan.architecture,
        place=place,
        num_layers=len(plan.layers),
        num_experts=max(layer.num_experts for layer in plan.layers),
        top_k=plan.top_k,
        packing=plan.packing,
        slot_bytes=max(recipes.layout.slot_bytes for recipes in plan.recipes),
        stored_bytes=max(recipes.bytes_per_expert() for recipes in plan.recipes),
        expert_params=max(
            sum(prod(spec.shape) for spec in layer.layout.params) for layer in plan.layers
        ),
        dense_bytes=plan.dense_bytes,
        step_dense_bytes=plan.dense_bytes - unread,
        dense_params=sum(prod(weight.shape) for weight in others if len(weight.shape) > 1),
        head_params=sum(prod(weight.shape) for weight in (head or embedding).values()),
        kv=kv_bytes_of(plan.config),
    )


def kv_bytes_of(config: Any) -> KvBytes:
    """By the names that transformers' configs use."""
    config = config.get_text_config()
    layers = config.num_hidden_layers
    latent = getattr(config, "kv_lora_rank", None)
    if latent is not None:  # the cache has latents, which all heads share
        width = latent + config.qk_rope_head_dim
    else:
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        width = 2 * (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    types = getattr(config, "layer_types", None) or ["full_attention"] * layers
    window = getattr(config, "sliding_window", None) or 0
    sliding = sum("sliding" in kind for kind in types) if window else 0
    growing = sum(kind not in NO_KEYS for kind in types) - sliding
    item = KV_ITEM_BYTES
    return KvBytes(growing * width * item, sliding * width * item, window)
