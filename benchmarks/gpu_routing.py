"""Which experts a request asks for: those of a recorded one, where there is a trace of the shape.
The routers of random weights know nothing of what experts have in common.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_models import Shape
from torch import Tensor

from moe_infinity import MoE


@cache
def recorded_requests(folder: Path, shape: Shape, num_tokens: int) -> Tensor | None:
    """[requests, tokens, MoE layers, K]: the first tokens of those that are long enough, and
    that do not repeat themselves; of as many MoE layers as are built, from the first to the last.
    None if there is no such trace.
    """
    file = folder / str(shape.trace) / "experts.npz"
    if not file.is_file():
        return None
    with np.load(file) as arrays:
        experts, offsets = arrays["experts"], arrays["offsets"]
    lines = file.with_name("sequences.jsonl").read_text("utf-8").splitlines()
    layers = np.linspace(0, experts.shape[1] - 1, shape.layers).round().astype(int)
    requests = [
        experts[begin : begin + num_tokens, layers]
        for begin, end, line in zip(offsets[:-1], offsets[1:], lines, strict=True)
        if end - begin >= num_tokens and not json.loads(line).get("has_repetition")
    ]
    return torch.from_numpy(np.stack(requests)).long() if requests else None


def forget_graphs(moe: MoE) -> None:
    """What is patched since they were captured is not in them."""
    if moe._graphed is not None:
        moe._graphed.forget()


@contextmanager
def replaying(moe: MoE, request_NLK: Tensor | None, device: str) -> Iterator[None]:
    """Within, one request: its tokens, as the model is called with them, go to these experts with
    the weights of the router. A step of one token reads them from one place, where a CUDA graph
    finds those of every step.
    """
    if request_NLK is None:
        yield
        return
    forget_graphs(moe)  # they read where another request's experts were
    experts_LNK = request_NLK.transpose(0, 1).to(device)
    chosen_LTK = of_one_token_L1K = torch.empty_like(experts_LNK[:, :1])
    route: Callable[..., Tensor] = moe.engine.moe_layer
    forward = moe.model.forward
    num_done = 0

    def moe_layer(idx: int, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return route(idx, x_TD, chosen_LTK[idx], weights_TK)

    @wraps(forward)
    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_done, chosen_LTK
        num_tokens = (args[0] if args else kwargs["input_ids"]).shape[1]
        chosen_LTK = experts_LNK[:, num_done : num_done + num_tokens]
        if num_tokens == 1:
            chosen_LTK = of_one_token_L1K.copy_(chosen_LTK)
        num_done += num_tokens
        return forward(*args, **kwargs)

    with (
        mock.patch.object(moe.engine, "moe_layer", moe_layer),
        mock.patch.dict(vars(moe.model), {"forward": counting}),
    ):
        yield
