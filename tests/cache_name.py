"""How models of the installed transformers call the KV cache that they are given."""

from __future__ import annotations

from transformers import GenerationMixin

from moe_infinity.architectures.cache_argument import cache_parameter

CACHE = cache_parameter(GenerationMixin.prepare_inputs_for_generation)
