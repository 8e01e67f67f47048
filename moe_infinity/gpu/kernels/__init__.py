"""The kernels of this engine: Triton's for a GPU, their plain definitions for a device
in host memory, which has none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_infinity.engine.slots import PairKernels


class Kernels(NamedTuple):
    """One kernel of each kind. reference.py says what each computes."""

    resolve: Callable[..., Tensor]
    fill: Callable[..., None]
    compute_pairs: Callable[..., None]  # kernels/triton/experts.py
    sum_pairs: Callable[..., Tensor]
    attend: Callable[..., Tensor]
    attend_latent: Callable[..., Tensor]
    make_heads: Callable[..., tuple[Tensor, Tensor]]
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., Tensor]
    choose: Callable[..., tuple[Tensor, Tensor]]

    @property
    def pairs(self) -> PairKernels:
        """Those that a step of the host needs, too."""
        return PairKernels(self.compute_pairs, self.sum_pairs)


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels that run on a device."""
    if device.type == "cuda":
        return _of_triton()
    from moe_infinity.gpu.kernels import reference
    from moe_infinity.kernels.triton import reference as of_experts

    owners: dict[str, Any] = {"compute_pairs": of_experts, "sum_pairs": of_experts}
    return Kernels(*(getattr(owners.get(name, reference), name) for name in Kernels._fields))


def _of_triton() -> Kernels:
    from moe_infinity.gpu.kernels import attention, resolve, routing, rows
    from moe_infinity.gpu.kernels.packed import any_tile
    from moe_infinity.kernels.triton import experts

    return Kernels(
        resolve=resolve.resolve,
        fill=resolve.fill,
        compute_pairs=partial(experts.compute_pairs, load=any_tile),
        sum_pairs=experts.sum_pairs,
        attend=attention.attend,
        attend_latent=attention.attend_latent,
        make_heads=rows.make_heads,
        rms_norm=rows.rms_norm,
        add_rms_norm=rows.add_rms_norm,
        gated=rows.gated,
        choose=routing.choose,
    )
