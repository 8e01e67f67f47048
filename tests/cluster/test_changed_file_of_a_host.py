"""A host of experts whose file is shortened while it computes answers with an error."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch

from moe_infinity.checkpoint import expert_loader
from moe_infinity.cluster.expert_host import ExpertHost
from moe_infinity.cluster.share import Share
from moe_infinity.cluster.steps import LayerRouting, RowsRequest
from moe_infinity.config import OffloadConfig
from moe_infinity.errors import CheckpointError
from moe_infinity.kernels.many_rows import RowPath
from moe_infinity.memory.slots import MappedSlots


def test_what_was_computed_while_the_file_was_shortened_is_no_answer(
    tiny_checkpoint, copy_of, monkeypatch
):
    monkeypatch.setattr(expert_loader, "MIN_MAPPED_BYTES", 0)
    folder = copy_of(tiny_checkpoint)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    config = OffloadConfig.from_options(None, {"preload": "off"})
    host = ExpertHost(str(folder), config, 0, 1)
    if not isinstance(host.engine.tiers[0].slots, MappedSlots):
        pytest.skip("this system does not map files")
    share = Share([0, 1], [1, 2], torch.ones(1, width), torch.tensor([0, 0]), path=RowPath.FEW)
    request = RowsRequest(0, [LayerRouting(0, np.array([[0, 1]]))], share)
    found = host.answer(request)
    run_layer = host.engine.run_layer

    def shortened(*args):
        os.truncate(file, 0)
        run_layer(*args)

    monkeypatch.setattr(host.engine, "run_layer", shortened)
    with pytest.raises(CheckpointError, match=r"model.safetensors: was changed"):
        host.answer(request)
    monkeypatch.setattr(host.engine, "run_layer", run_layer)
    file.write_bytes(whole)
    assert torch.equal(host.answer(request), found)
    host.close()
