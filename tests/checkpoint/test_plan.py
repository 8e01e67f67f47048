"""What a plan says of a checkpoint before any weight is read."""

from __future__ import annotations

import pytest
from transformers import HunYuanMoEV1Config

from moe_infinity import ConfigError, MoE
from moe_infinity.checkpoint.plan import top_k_of
from moe_infinity.loading.model import plan_from_headers
from moe_infinity.memory.room import ProcessMemory
from tests import safetensors_file
from tests.prefixes.tiny_models import save_tiny


def test_weights_that_the_models_class_leaves_out_are_not_dense(tmp_path):
    """Layers that predict tokens ahead: gigabytes in published checkpoints."""
    folder = save_tiny("qwen3_next", tmp_path)
    known = plan_from_headers(str(folder), dtype="auto").dense
    more = {
        f"mtp.layers.0.mlp.experts.{at}.up_proj.weight": ("F32", [2], bytes(8)) for at in (0, 1)
    }
    safetensors_file.rebuild(folder / "model.safetensors", lambda tensors: tensors.update(more))
    assert plan_from_headers(str(folder), dtype="auto").dense.keys() == known.keys()
    with MoE(folder) as moe:
        assert moe.engine.bookkeeping.total_experts > 0


def test_of_numbers_for_each_layer_the_most_experts_of_a_token_count():
    assert top_k_of(HunYuanMoEV1Config(moe_topk=[2, 4, 3])) == 4
    assert top_k_of(HunYuanMoEV1Config(moe_topk=2)) == 2


def test_weights_that_memory_has_no_room_for_are_refused_before_they_are_read(
    tiny_checkpoint, monkeypatch
):
    """The system ended the process while it read them, without a word."""
    monkeypatch.setattr(ProcessMemory, "left", lambda self: 1000)
    read = []
    with pytest.raises(ConfigError, match="all weights but experts take .* memory has 1000 B left"):
        MoE(tiny_checkpoint, on_bytes=lambda done, total: read.append(done))
    assert read == []
    with MoE(tiny_checkpoint, host_memory="50%") as moe:  # whoever says how much has been asked
        assert moe.engine.bookkeeping.total_experts > 0
