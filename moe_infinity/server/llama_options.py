"""Options of sampling in the words of llama.cpp and Ollama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_infinity.server.fields import SAMPLERS, problem_of
from moe_infinity.server.refusals import BadRequest

# By option, the field of a request of OpenAI's, or of vLLM's where OpenAI has none.
FIELDS = {
    "num_predict": "max_tokens",
    "n_predict": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
}
RANDOM_SEEDS = (-1, 2**32 - 1)


def options_of(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The fields of a request of OpenAI's that mean the same as these options. Those of the machine
    have no effect.

    Raises BadRequest for a sampler that this server has not. `prefix`: of the names of options.
    """
    for name in SAMPLERS:
        if (problem := problem_of(name, options.get(name))) is not None:
            raise BadRequest(problem, param=f"{prefix}{name}")
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
