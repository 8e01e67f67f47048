"""Graphs for a CPU, in place of CUDA graphs: kernels are recorded with the memory they work on, and
a replay runs them again, without Python. What CUDA refuses while it captures is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from moe_infinity import MoE
from moe_infinity.gpu import engine, graphed_step
from moe_infinity.gpu.device_steps import DeviceSteps
from moe_infinity.gpu.kernels import Kernels, kernels_for
from tests.cache_name import CACHE
from tests.gpu.fast_device import on_device
from tests.on_device import LONG_PROMPT, PROMPT, greedy

aten: Any = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.lift_fresh.default}  # for, or from, the host

BATCH = torch.tensor([[0, 0, 0, 5, 9, 40], [7, 3, 17, 5, 9, 40]])
PADDED = BATCH, (BATCH > 0).long()  # ids and mask


class Recorder(TorchDispatchMode):
    """Kernels run once when they are recorded; `undo` takes back what they wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], Any]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WAITS or has_any_shape(func, args):
            raise RuntimeError(f"{func}: not permitted when stream is capturing")
        for declared, value in zip(func._schema.arguments, args, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                self._before.append((value, value.clone()))
        out = func(*args, **kwargs)
        known = {memory_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        fresh = [memory_of(t) not in known for t in tree_leaves(out)]
        if any(fresh) or func._schema.is_mutable:  # else a view, which launches nothing
            self.calls.append(partial(run_again, func, args, kwargs, tree_leaves(out), fresh))
        return out

    def undo(self) -> None:
        for value, before in reversed(self._before):
            value.copy_(before)


def has_any_shape(func: Any, args: Any) -> bool:
    """Whether the device has to say how large the result is."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    indices = tree_leaves(args[1:]) if func is aten.index.Tensor else []
    return not indices or any(t is not None and t.dtype is torch.bool for t in indices)


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def run_again(func: Any, args: Any, kwargs: Any, outs: list[Tensor], fresh: list[bool]) -> None:
    found = tree_leaves(func(*args, **kwargs))
    for out, new, is_fresh in zip(outs, found, fresh, strict=True):
        if is_fresh:
            out.copy_(new)


def without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a recording is compared with."""
    monkeypatch.setattr(graphed_step, "WARM_UP_STEPS", 1 << 30)


def record_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """From now on captures are recordings; gives them as they come."""
    found: list[Recorder] = []
    recording: list[Recorder] = []
    compute = DeviceSteps._compute

    def capture(stream: object, run: Callable[[], Any]) -> Callable[[], Any]:
        recorder = Recorder()
        recording.append(recorder)
        try:
            with recorder:
                out = run()
        finally:
            recording.pop()
            recorder.undo()
        found.append(recorder)

        def replay() -> Any:
            for call in recorder.calls:
                call()
            return out

        return replay

    def kernels_of_a_layer(self: DeviceSteps, layer: int, x_TD: Tensor, *args: Any) -> Tensor:
        """One call: the reference looks into memory with Python."""
        if not recording:
            return compute(self, layer, x_TD, *args)
        out_TD = torch.empty_like(x_TD)
        recording[-1].calls.append(lambda: out_TD.copy_(compute(self, layer, x_TD, *args)))
        return out_TD

    def recorded(device: torch.device) -> Kernels:
        plain = kernels_for(device)
        return plain._replace(
            attend=partial(attend, plain.attend),
            attend_latent=partial(attend, plain.attend_latent),
        )

    def attend(plain: Callable[..., Tensor], query: Tensor, *args: Any, **more: Any) -> Tensor:
        if not recording:
            return plain(query, *args, **more)
        is_latent = plain is kernels_for(query.device).attend_latent
        width = query.shape[-1] if is_latent else args[1].shape[-1]
        out = query.new_empty(*query.shape[:-1], width)
        recording[-1].calls.append(lambda: out.copy_(plain(query, *args, **more)))
        return out

    monkeypatch.setattr(engine, "kernels_for", recorded)
    monkeypatch.setattr(graphed_step, "has_graphs", lambda device: True)
    monkeypatch.setattr(graphed_step, "capture", capture)
    monkeypatch.setattr(DeviceSteps, "_compute", kernels_of_a_layer)
    return found


# What is compared


@torch.no_grad()
def without_and_with_graph(
    monkeypatch: pytest.MonkeyPatch, folder: Path, run: Callable[[MoE], list[Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """What `run` gives of a model all of whose experts have slots."""
    found = []
    for warm_up_steps in (1 << 30, graphed_step.WARM_UP_STEPS):
        with monkeypatch.context() as patch, on_device(folder, "100%") as moe:
            patch.setattr(graphed_step, "WARM_UP_STEPS", warm_up_steps)
            found.append(run(moe))
    return found[0], found[1]


@torch.no_grad()
def logits(moe: MoE, ids: Tensor, mask: Tensor, num_tokens: int = 24, **more: Any) -> Tensor:
    out = moe.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False,
        output_logits=True, return_dict_in_generate=True, **more,
    )  # fmt: skip
    return torch.stack(out.logits)


def logits_without_graph(
    folder: Path, prompts: dict[str, tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Of each prompt, ids and mask, of a model all of whose experts have slots."""
    with pytest.MonkeyPatch.context() as patched:
        without_graphs(patched)  # before the model is opened, which then has the same kernels
        with on_device(folder, "100%") as moe:
            return {name: logits(moe, *prompt) for name, prompt in prompts.items()}


def tokens_without_graph(folder: Path) -> tuple[Tensor, Tensor]:
    """Of the short and the long prompt, by the kernels that a recording has."""
    with pytest.MonkeyPatch.context() as patched:
        without_graphs(patched)
        with on_device(folder, "100%") as moe:
            return greedy(moe), greedy(moe, LONG_PROMPT)


def conversation(moe: MoE) -> list[Tensor]:
    """Logits of two turns with one cache; in the second prompt the window fills up."""
    cache = DynamicCache(config=moe.model.config)
    ids, found = torch.empty(1, 0, dtype=torch.int64), []
    for more in (PROMPT[:, :4], LONG_PROMPT[:, :9]):
        ids = torch.cat([ids, more], dim=1)
        out = moe.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **{CACHE: cache},
            max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        ids = out.sequences
        found += out.logits
    return found


def beams(moe: MoE) -> list[Tensor]:
    """They take turns in the cache, which then lies somewhere else."""
    ids: Tensor = moe.generate(
        input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=24,
        do_sample=False, num_beams=3,
    )  # fmt: skip
    return [ids]
