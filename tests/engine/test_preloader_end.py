"""A program that ends with its model open says nothing of the threads that end with it."""

from __future__ import annotations

import time
from threading import Event

from moe_infinity import MoE
from moe_infinity.engine.preloader import Preloader
from moe_infinity.memory.threads import PoolClosed


def test_preloading_ends_with_its_threads(tiny_checkpoint, monkeypatch, caplog):
    closed = Event()

    def end(preloader: Preloader) -> bool:
        closed.set()
        raise PoolClosed("moe-infinity-preload: closed")

    monkeypatch.setattr(Preloader, "advance", end)
    with MoE(tiny_checkpoint, host_memory="100%") as moe:
        moe.engine.start_preloading()
        assert closed.wait(10)
        time.sleep(0.1)
    assert "goes on" not in caplog.text
