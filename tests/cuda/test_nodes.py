"""How many kernels a captured decode step launches for a layer, on a device that is nowhere."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from benchmarks.gpu_models import deepseek_v2_lite, qwen3
from moe_infinity.cuda import norms
from moe_infinity.cuda.graphed_step import GraphedStep
from tests.cuda.fast_device import STATIC, on_device
from tests.cuda.no_device import NOWHERE, Captured
from tests.cuda.on_device import greedy

# They launch nothing: they allocate, or look at a tensor in another way.
WITHOUT_KERNEL = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
    "aten::_unsafe_view", "aten::detach", "aten::lift_fresh", "aten::_reshape_alias",
}  # fmt: skip
PLAIN_NORM = norms.plain_rms_norm
OF_EXPERTS = 5  # resolve, fill, up, down, sum
# For a layer, with norms of one kernel; without, 68 and 62. Wanted are 16 and 18.
MOST_NODES = {"qwen3": (qwen3, 40), "deepseek-v2-lite": (deepseek_v2_lite, 41)}


class Nodes(TorchDispatchMode):
    """Counts operations that launch a kernel; attention by torch is one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.name().split(".")[0]
        if not func.is_view and name not in WITHOUT_KERNEL:
            self.found[name] += 1
        return func(*args, **kwargs or {})

    def norm(self, x: Tensor, *args: Any) -> Tensor:
        if x.device != NOWHERE:  # before the step that is counted
            return PLAIN_NORM(x, *args)
        self.found["norm"] += 1
        return x.new_empty(x.shape)

    def attention(self, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.found["attention"] += 1
        value = args[1]
        return query.new_empty(*query.shape[:-1], value.shape[-1])


def nodes_of_a_step(config: Any, folder: Path) -> Counter[str]:
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)

    def capture(step: GraphedStep, *args: Any) -> None:
        raise Captured(step, *args)

    nodes = Nodes()
    counted = (
        mock.patch.object(functional, "scaled_dot_product_attention", nodes.attention),
        torch.no_grad(),
        nodes,
    )
    patched = mock.patch.object(norms, "plain_rms_norm", nodes.norm)
    with patched, mock.patch.object(GraphedStep, "_capture", capture), ExitStack() as stack:
        moe = stack.enter_context(on_device(folder, "100%", "100%"))
        with pytest.raises(Captured) as captured:
            greedy(moe, num_tokens=4, **STATIC)
        for context in counted:
            stack.enter_context(context)
        captured.value.run()
    return nodes.found


@pytest.mark.parametrize("name", MOST_NODES)
def test_a_layer_takes_no_more_kernels_than_before(name, tmp_path):
    config_of, most = MOST_NODES[name]
    few, more = (
        nodes_of_a_step(config_of(layers, is_tiny=True), tmp_path / str(layers))
        for layers in (2, 4)
    )
    of_a_layer = Counter({kind: (more[kind] - few[kind]) // 2 for kind in more})
    assert of_a_layer["attention"] == 1
    assert of_a_layer.total() + OF_EXPERTS <= most, +of_a_layer
