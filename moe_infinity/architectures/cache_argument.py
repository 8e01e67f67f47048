"""The name of the KV cache among the arguments of a forward method.

transformers 5.24 renamed it. Code that comes with a checkpoint may use either name, and so may the
caller of a model: code that reads a call looks for both.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from inspect import signature
from typing import Any

from moe_infinity.errors import UnsupportedModelError

CACHE_NAMES = ("cache", "past_key_values")  # if a call has both, transformers takes the first


def cache_name(names: Container[str]) -> str | None:
    """Return the KV cache's name among names of parameters or arguments; None if it is not there."""
    return next((name for name in CACHE_NAMES if name in names), None)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the KV cache among the arguments of a call; None if there is none."""
    return arguments.get(cache_name(arguments) or "")


def cache_parameter(forward: Callable[..., Any]) -> str:
    """Return the name by which a forward method takes a KV cache. Raises UnsupportedModelError if it
    takes none: a cache that is dropped leaves each token without those before it.
    """
    name = cache_name(signature(forward).parameters)
    if name is None:
        raise UnsupportedModelError(
            f"{getattr(forward, '__qualname__', forward)}() takes no KV cache; "
            f"expected a parameter named {' or '.join(CACHE_NAMES)}\n"
            "hint: without one there is no decode step; generate() with use_cache=False may run it"
        )
    return name
