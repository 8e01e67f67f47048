"""Nothing collects garbage while a command imports or a model is loaded, whatever comes of it."""

from __future__ import annotations

import gc
import importlib

import pytest

from moe_infinity.system.garbage import no_garbage_collection


def test_no_garbage_is_collected_meanwhile_and_it_is_afterwards():
    with no_garbage_collection():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_garbage_is_collected_after_an_import_that_failed():
    with pytest.raises(ImportError), no_garbage_collection():
        importlib.import_module("moe_infinity.no_such_module")
    assert gc.isenabled()
