"""A device that is nowhere: torch's meta tensors in the place of a GPU's. They have no values, so
nothing can be read back from them, and each operation shows where its tensors are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe_infinity.engine.compute import LayerComputer
from moe_infinity.engine.slots import PairKernels
from moe_infinity.kernels.triton.slot_mlp import SlotMlp
from tests.fake_cuda import FakeCudaDevice

NOWHERE = torch.device("meta")
NUM_EXPERTS = 4  # that made-up routing goes to: a model has more, and fewer per token
# They copy numbers from the host, which a meta tensor would not show.
FROM_THE_HOST = {torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor}


def compute_pairs(
    mlp: SlotMlp,
    x_TD: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    pointers_E: Tensor,
    out_PD: Tensor,
) -> None:
    assert weights_TK.shape == index_TK.shape
    assert len({t.device for t in (x_TD, index_TK, weights_TK, pointers_E, out_PD)}) == 1


def sum_pairs(
    mlp: SlotMlp, out_PD: Tensor, index_TK: Tensor, weights_TK: Tensor, dtype: torch.dtype
) -> Tensor:
    return out_PD.new_empty(len(index_TK), out_PD.shape[1], dtype=dtype)


PAIR_KERNELS = PairKernels(compute_pairs, sum_pairs)  # ours need memory to look into


class MetaCudaDevice(FakeCudaDevice):
    """Models opened with it have everything there but HOST."""

    device = NOWHERE

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=NOWHERE)


class _Unmixed(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if len({t.device for t in tensors if t.ndim}) > 1 and func.name() != "aten::copy_":
            raise AssertionError(f"{func.name()} mixes devices")
        return func(*args, **kwargs or {})


class _NotFromTheHost(TorchFunctionMode):
    """A device waits for such a copy, and all that was launched before it."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        out = func(*args, **kwargs or {})
        if func in FROM_THE_HOST and isinstance(out, Tensor) and out.device == NOWHERE:
            raise AssertionError(f"{func.__name__} copies from the host")
        return out


@contextmanager
def made_up_routing() -> Iterator[None]:
    """The host asks for routing, token ids and a signature, of which there are none: so they are
    made up. Nothing else can be asked for, no operation may mix devices, and experts copy nothing.
    """
    cpu = Tensor.cpu

    def made_up(tensor: Tensor) -> Tensor:
        if tensor.device != NOWHERE:
            return cpu(tensor)
        ids = torch.arange(tensor.numel()) % NUM_EXPERTS
        return ids.to(tensor.dtype).view(tensor.shape)

    compute = LayerComputer.compute

    def watched(*args: Any) -> None:
        with _NotFromTheHost():
            compute(*args)

    asked = mock.patch.object(Tensor, "cpu", made_up)
    computing = mock.patch.object(LayerComputer, "compute", watched)
    with asked, computing, torch.no_grad(), _Unmixed():
        yield
