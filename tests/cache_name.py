"""How models of the installed transformers call the KV cache that they are given."""

from __future__ import annotations

from transformers import GenerationMixin

from moe_infinity.architectures.attention_inputs import cache_parameter

CACHE = cache_parameter(GenerationMixin.prepare_inputs_for_generation)
