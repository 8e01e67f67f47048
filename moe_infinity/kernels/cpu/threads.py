"""How many threads kernels use: torch's number, also while torch itself has been left with one.

torch's threads meet at the end of every operation that is shared, however small. Where somebody
else has work for a core, each meeting waits for it: with one core of two taken, decode steps of 7
layers took 138 ms, 45 when only kernels, which hand out what is left to whoever is free, had both.
"""

from __future__ import annotations

import threading

import torch


class _Kept(threading.local):
    num_threads: int | None = None  # torch's number, while it has one


_kept = _Kept()


def num_threads() -> int:
    return _kept.num_threads or torch.get_num_threads()


def leave_torch_one() -> None:
    """In this thread, until `give_torch_all`."""
    if _kept.num_threads is None and torch.get_num_threads() > 1:
        _kept.num_threads = torch.get_num_threads()
        torch.set_num_threads(1)


def give_torch_all() -> None:
    """Again is harmless."""
    if _kept.num_threads is not None:
        torch.set_num_threads(_kept.num_threads)
        _kept.num_threads = None
