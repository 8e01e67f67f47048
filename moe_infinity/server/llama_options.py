"""Options of sampling in the words of llama.cpp and Ollama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_infinity.server.field_tables import problem_of
from moe_infinity.server.refusals import BadRequest

# Those of Ollama that have an effect. The others that it has are about the machine.
SAMPLING = (
    "num_predict", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop",
    "repeat_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
RANDOM_SEED = 2**32 - 1  # beside -1


def options_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a request of OpenAI's that mean the same as these options."""
    given = {name: value for name, value in options.items() if value is not None}
    for name, least in (("n_predict", 0), ("num_predict", 1)):
        limit = given.get(name)
        if isinstance(limit, int) and limit < least:  # as many as the context leaves
            del given[name]
    if given.get("seed") == RANDOM_SEED:
        del given["seed"]
    top_k = given.get("top_k")
    if isinstance(top_k, int):
        given["top_k"] = max(top_k, 0)
    return given


def ollama_options_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same for options of Ollama.

    Raises BadRequest for one that would change an answer, and cannot be done.
    """
    for name, value in options.items():
        if (problem := problem_of(name, value)) is not None:
            raise BadRequest(problem, param=f"options.{name}")
    return options_of({name: options[name] for name in SAMPLING if name in options})
