"""Imports of a command collect no garbage, whatever comes of them."""

from __future__ import annotations

import gc
import importlib

import pytest

from moe_infinity.cli.models import importing


def test_no_garbage_is_collected_meanwhile_and_it_is_afterwards():
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_garbage_is_collected_after_an_import_that_failed():
    with pytest.raises(ImportError), importing():
        importlib.import_module("moe_infinity.no_such_module")
    assert gc.isenabled()
