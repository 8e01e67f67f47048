"""How the decode steps of an architecture would run on a GPU, seen on a fake device and on torch's
meta device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from moe_infinity import ConfigError, MoEInfinityError
from moe_infinity.gpu import cached_step
from moe_infinity.gpu.device_steps import DeviceSteps
from tests.gpu.fast_device import on_device
from tests.gpu.no_device import CannotBeCaptured, Captured, capturing
from tests.sweep import tiny
from tests.sweep.discover import Architecture
from tests.sweep.runners import outcome

GRAPH, DEVICE, HOST = "one graph", "kernel by kernel", "by the host"
NUM_TOKENS = 5  # enough for a capture


def decode_step(architecture: Architecture, folder: Path) -> str:
    """One of the three, or nothing for what cannot be loaded. `folder` will hold its checkpoint."""
    torch.manual_seed(0)
    try:
        tiny.tiny_model(architecture).save_pretrained(folder)
        return _watched(folder)
    except ConfigError:
        return HOST
    except MoEInfinityError:
        return ""


def _watched(folder: Path) -> str:
    with (
        capturing(),
        on_device(folder, "100%") as moe,
        mock.patch.object(
            DeviceSteps, "run_layer", autospec=True, side_effect=DeviceSteps.run_layer
        ) as rows,
        torch.no_grad(),
    ):

        def generate(**inputs: Any) -> Tensor:
            tokens: Tensor = moe.generate(**inputs | {"max_new_tokens": NUM_TOKENS})
            return tokens

        try:
            outcome(moe.model, generate)
        except Captured as step:
            try:
                step.run()
            except (CannotBeCaptured, cached_step.CannotBeCaptured):
                return DEVICE
            return GRAPH
        return DEVICE if rows.called else HOST
