"""How many threads kernels use: torch's number, also while torch itself is limited to one.

torch's threads wait for each other at the end of every operation they share, however small. If
another program keeps a core busy, each of these waits is long: with one of two cores busy, a decode
step of 7 layers took 138 ms. It took 45 ms when only kernels used both cores, whose free threads
take what work is left.
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
    """Limit torch to one thread for what this thread calls, until `give_torch_all`."""
    if _kept.num_threads is None and torch.get_num_threads() > 1:
        _kept.num_threads = torch.get_num_threads()
        torch.set_num_threads(1)


def give_torch_all() -> None:
    """Undo `leave_torch_one`; without it, do nothing."""
    if _kept.num_threads is not None:
        torch.set_num_threads(_kept.num_threads)
        _kept.num_threads = None
