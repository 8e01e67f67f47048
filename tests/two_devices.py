"""Two devices that are CPU memory, and a watch that sees what GPUs would refuse: a function of
torch given tensors of both. What is not said to be on the second device is on the first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from benchmarks.fake_link import FakeLink

FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 1)
BOTH = "cuda:0,cuda:1"


class SecondLink(FakeLink):
    """What it allocates is on the second device."""

    device = SECOND

    def empty(self, num_bytes: int) -> Tensor:
        return placed(super().empty(num_bytes), SECOND)

    def make_copies(self, until: Any = None) -> None:
        with torch._C.DisableTorchFunction():  # a copy may go from one memory to the other
            super().make_copies(until)


def placed(tensor: Tensor, place: torch.device) -> Tensor:
    tensor._place = place  # type: ignore[attr-defined]
    return tensor


def place_of(tensor: Tensor) -> torch.device:
    return getattr(tensor, "_place", tensor.device)


class TwoDevices(TorchFunctionMode):
    """While entered, what is computed of tensors is where they are, and all are in one place."""

    num_sent = 0  # tensors, from one to the other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        places = {place_of(tensor) for tensor in tensors}
        if kwargs.get("device") == SECOND:
            kwargs["device"] = FIRST
            places.add(SECOND)
        is_moved = func is Tensor.to and isinstance(args[-1], torch.device)
        if is_moved and {args[-1]} != places and SECOND in {args[-1], *places}:
            self.num_sent += 1
            return placed(args[0].clone(), args[-1])
        if SECOND not in places:
            return func(*args, **kwargs)
        assert len(places) == 1, f"{func} with tensors on {places}"
        if func == Tensor.device.__get__:
            return SECOND
        found = func(*args, **kwargs)
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                placed(tensor, SECOND)
        return found
