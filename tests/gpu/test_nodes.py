"""How many kernels the host launches for a layer: in a captured decode step, on a device that is
nowhere, and in a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.gpu_models import deepseek_v2_lite, qwen3
from moe_infinity.experts import Phase, Step
from moe_infinity.gpu import engine
from moe_infinity.gpu.graphed_step import GraphedStep
from moe_infinity.gpu.kernels import kernels_for
from tests.cache_name import CACHE
from tests.gpu import no_device
from tests.gpu.fast_device import experts_of, on_device
from tests.gpu.no_device import Captured, capturing
from tests.gpu.recorded_graph import Recorder
from tests.on_device import PROMPT, greedy

# They launch nothing: they allocate, or look at a tensor in another way.
WITHOUT_KERNEL = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
    "aten::_unsafe_view", "aten::detach", "aten::lift_fresh", "aten::_reshape_alias",
}  # fmt: skip
OF_EXPERTS = 6  # resolve, fill, plan, up, down, sum
# For a layer. As the modules' own code launches them there are 68 and 62.
MOST_NODES = {"qwen3": (qwen3, 15), "deepseek-v2-lite": (deepseek_v2_lite, 22)}


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

    def counted(self, name: str, compute: Callable[..., Any], launches: int = 1) -> Any:
        """It counts as so many, whatever it does here."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = Counter(self.found)
            out = compute(*args, **kwargs)
            self.found = before + Counter({name: launches})
            return out

        return run

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Inside, models that are opened have kernels that are counted."""
        plain = kernels_for(torch.device("cpu"))
        counted = {
            "rms_norm": self.counted("norm", plain.rms_norm),
            "add_rms_norm": self.counted("sum and norm", plain.add_rms_norm),
            "choose": self.counted("choice", plain.choose),
            "make_heads": self.counted("heads", plain.make_heads),
            "gated": self.counted("activation", plain.gated),
        }
        opened = plain._replace(**counted)
        counted["attend"] = self.counted("attention", no_device.attend, 2)  # and a sum of splits
        counted["attend_latent"] = self.counted("attention", no_device.attend_latent, 2)
        captured = no_device.KERNELS._replace(**counted)
        with (
            mock.patch.object(engine, "kernels_for", return_value=opened),
            mock.patch.object(no_device, "KERNELS", captured),
        ):
            yield


def nodes_of_a_step(config: Any, folder: Path, num_seqs: int = 1) -> Counter[str]:
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    nodes = Nodes()
    with nodes.kernels(), capturing(), on_device(folder, "100%") as moe:
        with pytest.raises(Captured) as captured:
            greedy(moe, PROMPT.expand(num_seqs, -1), num_tokens=4)
        nodes.found.clear()
        with torch.no_grad(), nodes:
            captured.value.run()
    return nodes.found


def of_a_layer(count: Callable[[Any, Path], Counter[str]], config_of: Any, folder: Path) -> Any:
    """Of each kind, given how many whole models take."""
    few, more = (count(config_of(layers, is_tiny=True), folder / str(layers)) for layers in (2, 4))
    return Counter({kind: (more[kind] - few[kind]) // 2 for kind in more})


@pytest.mark.parametrize("name", MOST_NODES)
def test_a_layer_takes_no_more_kernels_than_before(name, tmp_path):
    config_of, most = MOST_NODES[name]
    found = of_a_layer(nodes_of_a_step, config_of, tmp_path)
    assert found.total() + OF_EXPERTS <= most, +found


@pytest.mark.parametrize("num_seqs", [8, 9, 16, 32])
@pytest.mark.parametrize("name", MOST_NODES)
def test_a_layer_takes_as_many_kernels_for_any_number_of_sequences(name, num_seqs, tmp_path):
    config_of, most = MOST_NODES[name]

    def count(config: Any, folder: Path) -> Counter[str]:
        return nodes_of_a_step(config, folder, num_seqs)

    found = of_a_layer(count, config_of, tmp_path)
    # What is looked at of latents comes by heads, and is put together by tokens.
    assert found.total() + OF_EXPERTS <= most + (name == "deepseek-v2-lite"), +found


def host_operations(config: Any, folder: Path, graphs: list[Recorder]) -> Counter[str]:
    """Beside the launch of the graph, of one step in steady state."""
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    with on_device(folder, "100%") as moe, torch.no_grad():
        cache = DynamicCache(config=moe.model.config)
        greedy(moe, num_tokens=2, **{CACHE: cache})
        graphed = experts_of(moe).graphed
        for _ in range(3):  # to warm up, to capture, to count
            length = cache.get_seq_length()
            given = {
                "input_ids": torch.ones(1, 1, dtype=torch.int64),
                "attention_mask": torch.ones(1, length + 1, dtype=torch.int64),
                "position_ids": torch.full((1, 1), length),
            }
            moe._experts.begin_step(Step(Phase.DECODE, 1, 1, begins_B=np.zeros(1, dtype=bool)))
            if graphed.has_graph:
                graphs[-1].calls.clear()  # nothing runs
            nodes = Nodes()
            with nodes:
                graphed(**{CACHE: cache}, use_cache=True, return_dict=True, **given)
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


MOST_OF_A_PROMPT = {"qwen3": 15, "deepseek-v2-lite": 24}  # wanted are 25
# Plan, up, down and sum of experts, and the copy of the routing to the host. Unless every expert
# has a slot the host awaits that one, and copies routing and addresses to the device: two more.
OF_MANY_ROWS = 5


def of_a_prompt(config: Any, folder: Path) -> Counter[str]:
    """Without experts. Attention by torch is one operation."""
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    nodes = Nodes()
    without_experts = mock.patch.object(
        engine.DeviceExperts, "layer", lambda self, layer, x_TD, *_: torch.zeros_like(x_TD)
    )
    with nodes.kernels(), on_device(folder, "100%") as moe, without_experts:
        ids = torch.ones(1, 2048, dtype=torch.int64)
        nodes.found.clear()  # of trials
        attend = nodes.counted("attention", functional.scaled_dot_product_attention)
        counting = mock.patch.object(functional, "scaled_dot_product_attention", attend)
        # What counts operations would count as somebody who watches all modules.
        unwatched = mock.patch.object(GraphedStep, "look", return_value=True)
        with torch.no_grad(), nodes, counting, unwatched:
            moe.model.forward(input_ids=ids, use_cache=True)
    return nodes.found


@pytest.mark.parametrize("num_experts", [8, 256])
@pytest.mark.parametrize(
    "name", ["qwen3", pytest.param("deepseek-v2-lite", marks=pytest.mark.slow)]
)
def test_a_layer_of_a_prompt_takes_few_operations(name, num_experts, tmp_path):
    config_of, _ = MOST_NODES[name]

    def with_experts(layers: int, *, is_tiny: bool) -> Any:
        config = config_of(layers, is_tiny=is_tiny)
        config.num_experts = config.n_routed_experts = num_experts
        return config

    found = of_a_layer(of_a_prompt, with_experts, tmp_path)
    assert found["attention"] == 1
    del found["aten::zeros_like"]  # in place of experts
    assert found.total() + OF_MANY_ROWS <= MOST_OF_A_PROMPT[name], +found
