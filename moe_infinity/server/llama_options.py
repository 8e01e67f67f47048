"""Options of sampling in the words of llama.cpp and Ollama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_infinity.server.refusals import BadRequest

# By option, the field of a request of OpenAI's, or of vLLM's where OpenAI has none.
FIELDS = {
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
}
# Samplers that this server has not, and the value with which each has no effect. All other options
# are about the machine, or about samplers that have none.
WITHOUT_EFFECT = {
    "typical_p": 1,
    "tfs_z": 1,
    "top_n_sigma": -1,
    "mirostat": 0,
    "dynatemp_range": 0,
    "xtc_probability": 0,
    "dry_multiplier": 0,
}
RANDOM_SEEDS = (-1, 2**32 - 1)


def options_of(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of a request of OpenAI's that mean the same as these options.

    Raises BadRequest for a sampler that this server has not. `prefix`: of the names of options.
    """
    for name, neutral in WITHOUT_EFFECT.items():
        if options.get(name) not in (None, neutral):
            raise BadRequest("this sampler is not supported", param=f"{prefix}{name}")
    given = {
        field: options[name] for name, field in FIELDS.items() if options.get(name) is not None
    }
    limit = given.get("max_tokens")
    if isinstance(limit, int) and limit < 0:  # as many as the context leaves
        del given["max_tokens"]
    if given.get("seed") in RANDOM_SEEDS:
        del given["seed"]
    top_k = given.get("top_k")
    if isinstance(top_k, int):
        given["top_k"] = max(top_k, 0)
    if given.get("stop") in ("", []):
        del given["stop"]
    return given
