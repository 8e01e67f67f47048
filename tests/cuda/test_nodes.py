"""How many kernels a captured decode step launches for a layer, on a device that is nowhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.gpu_models import deepseek_v2_lite, qwen3
from moe_infinity.cuda import norms, routers
from moe_infinity.cuda.routers import RouterKernels
from moe_infinity.experts import Phase, Step
from moe_infinity.kernels.cuda import norms_reference, routing_reference
from moe_infinity.kernels.cuda.choice import ExpertChoice
from tests.cuda.fast_device import on_device
from tests.cuda.no_device import NOWHERE, Captured, capturing
from tests.cuda.on_device import greedy
from tests.cuda.recorded_graph import Recorder

# They launch nothing: they allocate, or look at a tensor in another way.
WITHOUT_KERNEL = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
    "aten::_unsafe_view", "aten::detach", "aten::lift_fresh", "aten::_reshape_alias",
}  # fmt: skip
PLAIN_NORM = norms_reference.plain_rms_norm
OF_EXPERTS = 5  # resolve, fill, up, down, sum
OF_ATTENTION = 3  # heads; splits of the tokens, and what puts them together
# For a layer. As the modules' own code launches them there are 68 and 62; wanted are 16 and 18.
MOST_NODES = {"qwen3": (qwen3, 16), "deepseek-v2-lite": (deepseek_v2_lite, 26)}


class Nodes(TorchDispatchMode):
    """Counts operations that launch a kernel."""

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

    def counted_norm(self, x: Tensor, *args: Any) -> Tensor:
        """By a CPU."""
        before = Counter(self.found)
        out = PLAIN_NORM(x, *args)
        self.found = before + Counter(norm=1)
        return out

    def router_logits(self, x_BD: Tensor, weight_ED: Tensor, bias: Tensor | None = None) -> Tensor:
        if x_BD.device != NOWHERE:
            return routing_reference.router_logits(x_BD, weight_ED, bias)
        self.found["router"] += 1
        return x_BD.new_empty(len(x_BD), len(weight_ED), dtype=torch.float32)

    def choose(self, logits_BE: Tensor, correction: Tensor | None, choice: ExpertChoice) -> Any:
        if logits_BE.device != NOWHERE:
            return routing_reference.choose(logits_BE, correction, choice)
        self.found["choice"] += 1
        shape = len(logits_BE), choice.top_k
        shares_BK = logits_BE.new_empty(shape, dtype=choice.dtype)
        return logits_BE.new_empty(shape, dtype=torch.int64), shares_BK


def nodes_of_a_step(config: Any, folder: Path) -> Counter[str]:
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    nodes = Nodes()
    patched = mock.patch.object(norms, "plain_rms_norm", nodes.norm)
    kernels = RouterKernels(nodes.router_logits, nodes.choose)
    choosing = mock.patch.object(routers, "router_kernels", return_value=kernels)
    with patched, choosing, capturing(), on_device(folder, "100%", "100%") as moe:
        with pytest.raises(Captured) as captured:
            greedy(moe, num_tokens=4)
        with torch.no_grad(), nodes:
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
    assert of_a_layer.total() + OF_EXPERTS + OF_ATTENTION <= most, +of_a_layer


def host_operations(config: Any, folder: Path, graphs: list[Recorder]) -> Counter[str]:
    """Beside the launch of the graph, of one step in steady state."""
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    with on_device(folder, "100%", "100%") as moe, torch.no_grad():
        cache = DynamicCache(config=moe.model.config)
        greedy(moe, num_tokens=2, past_key_values=cache)
        graphed = moe._graphed
        assert graphed is not None
        for _ in range(3):  # to warm up, to capture, to count
            length = cache.get_seq_length()
            given = {
                "input_ids": torch.ones(1, 1, dtype=torch.int64),
                "attention_mask": torch.ones(1, length + 1, dtype=torch.int64),
                "position_ids": torch.full((1, 1), length),
            }
            moe.engine.begin_step(Step(Phase.DECODE, 1, 1, begins_B=np.zeros(1, dtype=bool)))
            if graphed.has_graph:
                graphs[-1].calls.clear()  # nothing runs
            nodes = Nodes()
            with nodes:
                graphed(past_key_values=cache, use_cache=True, return_dict=True, **given)
        assert graphed.has_graph
    return nodes.found


def test_a_step_in_a_graph_takes_the_same_few_copies_for_any_number_of_layers(tmp_path, graphs):
    few, more = (
        host_operations(qwen3(layers, is_tiny=True), tmp_path / str(layers), graphs)
        for layers in (2, 4)
    )
    assert few == more
    # Ids, positions, the table of the cache, the mask as bytes, the logits.
    assert few.total() <= 6, few


# Wanted are 25: positions and routers of prompts are computed by the modules' own code.
MOST_OF_A_PROMPT = {"qwen3": 35, "deepseek-v2-lite": 39}
OF_MANY_ROWS = 5  # plan, up, down, sum of experts; the copy of the routing, which the host awaits


def of_a_prompt(config: Any, folder: Path) -> Counter[str]:
    """Of 128 tokens, without experts. Attention by torch is one operation."""
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    nodes = Nodes()
    patched = mock.patch.object(norms, "_norm_for", return_value=nodes.counted_norm)
    with patched, on_device(folder, "100%", "100%") as moe, moe.engine.without_experts():
        ids = torch.ones(1, 128, dtype=torch.int64)
        nodes.found.clear()  # of trials
        with torch.no_grad(), nodes, attention_is_one(nodes):
            moe.model.forward(input_ids=ids, use_cache=True)
    return nodes.found


@contextmanager
def attention_is_one(nodes: Nodes) -> Iterator[None]:
    attend = functional.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        before = Counter(nodes.found)
        out = attend(*args, **kwargs)
        nodes.found = before + Counter(attention=1)
        return out

    with mock.patch.object(functional, "scaled_dot_product_attention", counted):
        yield


@pytest.mark.parametrize("name", MOST_NODES)
def test_a_layer_of_a_prompt_takes_few_operations(name, tmp_path):
    config_of, _ = MOST_NODES[name]
    few, more = (
        of_a_prompt(config_of(layers, is_tiny=True), tmp_path / str(layers)) for layers in (2, 4)
    )
    of_a_layer = Counter({kind: (more[kind] - few[kind]) // 2 for kind in more})
    assert of_a_layer["attention"] == 1
    del of_a_layer["aten::zeros_like"]  # in place of experts
    assert of_a_layer.total() + OF_MANY_ROWS <= MOST_OF_A_PROMPT[name], +of_a_layer
