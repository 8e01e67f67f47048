"""Recorded requests: what of them is carried to a machine with a GPU, and how they are replayed.

The routers of random weights know nothing of what experts have in common. Where there are recorded
requests of a model, its tokens go to the experts of those.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_models import Shape
from torch import Tensor

from moe_infinity import MoE

MOST_REQUESTS, MOST_TOKENS = 16, 104
# Recorded requests by model. Carried are those of a folder with experts.npz and sequences.jsonl.
TRACES = {"deepseek-v2-lite": "deepseek-v2-lite_esft", "gpt-oss-20b": "gpt-oss-20b_decode"}
PACKAGES = ("gguf", "llguidance", "platformdirs")  # that images for work on GPUs may lack
MOST_CARRIED = 64 << 20


def carry(traces: Path, folder: Path) -> None:
    """Put what a machine needs beside the repository into a folder. Raises SystemExit."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for model, name in TRACES.items():
        if not (traces / name).is_dir():
            raise SystemExit(f"{traces} has no {name}: recorded requests of {model}")
        np.save(folder / f"{model}.npy", cut(traces / name, MOST_TOKENS))
    for package in PACKAGES:
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise SystemExit(f"{package} is not installed here")
        code = Path(spec.origin).parent
        for part in (code, *code.parent.glob(f"{package}-*.dist-info")):  # some ask for a version
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(part, folder / "packages" / part.name, ignore=ignored)
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if num_bytes > MOST_CARRIED:
        raise SystemExit(f"{folder} has {num_bytes / 2**20:.0f} MiB, more than can be carried")
    print(folder)


def cut(trace: Path, num_tokens: int) -> np.ndarray[Any, Any]:
    """[requests, tokens, MoE layers, K]: the first tokens of some that are long enough and do not
    repeat themselves.
    """
    with np.load(trace / "experts.npz") as arrays:
        experts, offsets = arrays["experts"], arrays["offsets"]
    lines = (trace / "sequences.jsonl").read_text("utf-8").splitlines()
    found = [
        experts[begin : begin + num_tokens]
        for begin, end, line in zip(offsets[:-1], offsets[1:], lines, strict=True)
        if end - begin >= num_tokens and not json.loads(line).get("has_repetition")
    ]
    return np.stack(found[:MOST_REQUESTS])


def requests_of(carried: Path, shape: Shape) -> Tensor | None:
    """[requests, tokens, MoE layers, K], of as many MoE layers as are built, from the first to the
    last. None if none were recorded, or carried.
    """
    file = carried / f"{shape.name}.npy"
    if not file.is_file():
        return None
    experts = np.load(file)
    layers = np.linspace(0, experts.shape[2] - 1, shape.layers).round().astype(int)
    return torch.from_numpy(experts[:, :, layers]).long()


class Replay:
    """Sends the tokens of a model to the experts of recorded requests, with the weights of the
    router. A step of one token reads them from one place, where a CUDA graph finds those of every
    step. Made before the model decodes.
    """

    def __init__(self, moe: MoE, requests_RNLK: Tensor | None) -> None:
        """Without requests the router's choice stays."""
        self.kind = "random" if requests_RNLK is None else "recorded"
        if requests_RNLK is None:
            return
        self._experts_RLNK = requests_RNLK.transpose(1, 2).to(moe.model.device)
        self._route: Callable[..., Tensor] = moe._experts.layer
        self._of_one_token_L1K = torch.empty_like(self._experts_RLNK[0, :, :1])
        self._chosen_LTK = self._of_one_token_L1K
        self.begin(0)
        forward = moe.model.forward

        @wraps(forward)
        def counting(*args: Any, **kwargs: Any) -> Any:
            self._take((args[0] if args else kwargs["input_ids"]).shape[1])
            return forward(*args, **kwargs)

        vars(moe.model)["forward"] = counting
        vars(moe._experts)["layer"] = self._layer

    def begin(self, number: int) -> None:
        """The tokens that come are those of this request."""
        if self.kind == "recorded":
            self._request_LNK = self._experts_RLNK[number % len(self._experts_RLNK)]
            self._num_done = 0

    def _take(self, num_tokens: int) -> None:
        self._chosen_LTK = self._request_LNK[:, self._num_done : self._num_done + num_tokens]
        if num_tokens == 1:
            self._chosen_LTK = self._of_one_token_L1K.copy_(self._chosen_LTK)
        self._num_done += num_tokens

    def _layer(self, idx: int, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return self._route(idx, x_TD, self._chosen_LTK[idx], weights_TK)
