"""The cache that `generate()` gets from us in place of the one that it would make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationMixin
from transformers.generation import GenerationMode

from moe_infinity.architectures.attention_inputs import cache_in, cache_parameter
from moe_infinity.errors import ConfigError
from moe_infinity.kernels.kv_layers import WINDOWS, new_cache
from moe_infinity.streaming import has_own_generate, merged_settings


def own_cache(model: Any, kv_dtype: str, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the argument of `generate()` by which keys and values are packed, and windows keep no
    more than they say; none if stock caches do, or the caller brings one. `named` are the other
    arguments. Raises ConfigError for those that make another cache than can be packed.
    """
    has_own = has_own_generate(model)
    if has_own and kv_dtype == "auto":
        return {}
    if model.config.is_encoder_decoder or not model._supports_default_dynamic_cache():
        return {}
    settings = merged_settings(model, named)
    if settings.use_cache is False or cache_in(named) is not None:
        return {}
    implementation = settings.cache_implementation
    others = {
        # transformers 5.24: with an assistant and a cache the tokens are wrong
        "an assistant or prompt lookup": settings.get_generation_mode(named.get("assistant_model"))
        is GenerationMode.ASSISTED_GENERATION,
        f"cache_implementation={implementation!r}": implementation not in (None, "hybrid"),
        "a generate() of the model's own": has_own,
    }
    reason = next((other for other, is_so in others.items() if is_so), None)
    if reason is not None:
        if kv_dtype != "auto":
            raise ConfigError(f"kv_dtype={kv_dtype!r} does not go with {reason}")
        return {}
    cache = new_cache(model.config, kv_dtype)
    if kv_dtype == "auto" and not any(isinstance(layer, WINDOWS) for layer in cache.layers):
        return {}
    return {cache_parameter(GenerationMixin.prepare_inputs_for_generation): cache}
