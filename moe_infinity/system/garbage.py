"""Python's search for garbage, which looks through all objects while many are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Inside, Python does not look for garbage. While packages are imported and models are loaded
    it finds little, and takes a quarter to a third of the time. What is made counts as old then, so
    that it is not looked through as soon as this is over.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_freeze_count() == 0:  # else somebody has put objects there
                gc.freeze()
                gc.unfreeze()  # to the oldest generation
            gc.enable()
