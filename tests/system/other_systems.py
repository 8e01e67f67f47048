"""A system that has nothing of what only Linux has."""

from __future__ import annotations

import pytest

from moe_infinity.system import linux


def leave_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the package takes the plain path, as on every system but Linux."""
    monkeypatch.setattr(linux, "is_linux", lambda: False)
