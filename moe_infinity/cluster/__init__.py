"""Several hosts: experts computed by other processes, and replicas of a model behind one address.

Replicas need the extra `cluster`, which brings Ray; `build_app` is imported only when it is used.
"""

from __future__ import annotations

from typing import Any

__all__ = ["build_app"]


def __getattr__(name: str) -> Any:
    if name == "build_app":
        from moe_infinity.cluster.replicas import build_app

        return build_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
