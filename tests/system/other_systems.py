"""Systems that lack some of this one's features."""

from __future__ import annotations

import dataclasses

import pytest

from moe_infinity.system import features

MACOS = ("o_direct", "fadvise", "page_cache", "huge_pages", "populate", "affinity")
OLD_MACOS = (*MACOS, "preadv")
# Not `timevals` and `own_symbols`: without them this system is told what only Windows understands.
WINDOWS = (*OLD_MACOS, "pread", "private_maps", "folder_sync", "pthread_kill", "sessions")
SYSTEMS = {"macos": MACOS, "old-macos": OLD_MACOS, "windows": WINDOWS}
EACH = [field.name for field in dataclasses.fields(features.Features)]


def use(
    monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...], present: tuple[str, ...] = ()
) -> None:
    """From now on this system lacks some features, and has others."""
    changes = dict.fromkeys(missing, False) | dict.fromkeys(present, True)
    another = dataclasses.replace(features.found(), **changes)
    monkeypatch.setattr(features, "found", lambda: another)
