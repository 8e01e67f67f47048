"""Trials of layers whose weights stay packed."""

from __future__ import annotations

import gc
import weakref

import torch

from moe_infinity import MoE
from moe_infinity.architectures.attention_search import LayerTrial
from tests.gguf_files import build
from tests.gguf_models import WIDE
from tools.convert_to_gguf import convert


def test_weights_are_unpacked_once_and_nothing_stays(tmp_path):
    """Nor waits for the collector of garbage, which does not run while a model is loaded."""
    file = tmp_path / "model.gguf"
    convert(build("qwen3_moe", tmp_path / "model", **WIDE), file, "q8_0")
    unpacked: dict[str, torch.Tensor] = {}
    with MoE(file) as moe, torch.no_grad():
        layer = moe.model.model.layers[0]
        for seed in (1, 2):
            trial = LayerTrial(layer, seed=seed, gives_two=False, unpacked=unpacked)
            linear = trial.module.self_attn.q_proj
            x = trial.random(3, linear.in_features)
            weight = layer.self_attn.q_proj.packed.unpacked(torch.float32)
            assert torch.equal(linear(x), torch.nn.functional.linear(x, weight))
            kept = unpacked["self_attn.q_proj"]
            linear(x)
            assert unpacked["self_attn.q_proj"] is kept
            alive = weakref.ref(linear)
            was_enabled = gc.isenabled()
            gc.disable()
            try:
                del trial, linear
                assert alive() is None
            finally:
                if was_enabled:
                    gc.enable()
