"""Experts of quantized checkpoints compute where the page cache has them: scales and biases lie in
tensors of their own, at other distances for each expert.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe_infinity.checkpoint import expert_loader
from tests import quantized_checkpoints
from tests.test_mapped import can_map, computed

__all__ = ["can_map"]  # a fixture


@pytest.mark.usefixtures("can_map")
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("name", ["mxfp4", "fp8", "nvfp4", "gptq"])
def test_parts_in_tensors_of_their_own_are_used_there(
    tmp_path: Path, name: str, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = quantized_checkpoints.build(name, tmp_path / "model")
    monkeypatch.setattr(expert_loader, "MIN_MAPPED_BYTES", 0)
    mapped, is_mapped = computed(folder, exact=is_exact)
    assert is_mapped
    monkeypatch.setattr(expert_loader, "MIN_MAPPED_BYTES", 1 << 40)
    copied, is_mapped = computed(folder, exact=is_exact)
    assert not is_mapped
    assert torch.equal(mapped, copied)
