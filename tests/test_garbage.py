"""Nothing collects garbage while a command imports or a model is loaded, whatever comes of it."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator

import pytest

from moe_infinity.system.garbage import no_garbage_collection


def test_no_garbage_is_collected_meanwhile_and_it_is_afterwards():
    with no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.fixture
def nothing_is_frozen() -> Iterator[None]:
    """As outside of these tests, which freeze what was imported."""
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if was_frozen:
        gc.freeze()


@pytest.mark.usefixtures("nothing_is_frozen")
def test_what_is_made_meanwhile_counts_as_old(monkeypatch):
    """Before the collector runs again: its first run would make it old, too."""
    num_young: list[int] = []
    stock_enable = gc.enable

    def enable() -> None:
        num_young.append(len(gc.get_objects(generation=0)))
        stock_enable()

    monkeypatch.setattr(gc, "enable", enable)
    with no_garbage_collection():
        made: list[list[int]] = [[] for _ in range(100_000)]
    assert num_young[0] < len(made)


@pytest.mark.usefixtures("nothing_is_frozen")
def test_what_somebody_has_frozen_stays_so():
    gc.freeze()
    with no_garbage_collection():
        pass
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_it_stays_off_where_it_was_off():
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_garbage_is_collected_after_an_import_that_failed():
    with pytest.raises(ImportError), no_garbage_collection():
        importlib.import_module("moe_infinity.no_such_module")
    assert gc.isenabled()
