"""The kernels of experts inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from tests.kernels.triton.slot_experts import DEVICE, TRITON, Experts, inputs, routing, slot_moe

pytestmark = [pytest.mark.arithmetic, pytest.mark.triton]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_captured_layer_follows_what_changes_around_it():
    experts = Experts("bf16", 256, 128, num=6)
    slots = experts.slots.cuda()
    x, index = inputs("bf16", 2, 256).cuda(), torch.zeros(2, 3, dtype=torch.int64).cuda()
    weights = torch.zeros(2, 3).cuda()
    pointers = slots.data_ptr() + torch.arange(6).cuda() * slots.shape[1]
    slot_moe(TRITON, experts.mlp, x, index, weights, pointers)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = slot_moe(TRITON, experts.mlp, x, index, weights, pointers)
    for _ in range(3):
        new_index, new_weights = routing(2, 3, 6)
        x.copy_(inputs("bf16", 2, 256))
        index.copy_(new_index)
        weights.copy_(new_weights)
        graph.replay()
        assert experts.largest_error(found.cpu(), x.cpu(), new_index, new_weights) < 1
