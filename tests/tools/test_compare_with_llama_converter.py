"""Two files of one model are compared by tensors and keys."""

from __future__ import annotations

import numpy as np
from gguf import GGUFReader
from gguf import GGUFValueType as T

from tests.gguf_files import build, rewrite
from tools.compare_with_llama_converter import differences
from tools.convert_to_gguf import convert


def test_each_tensor_and_key_that_differs_has_a_line(tmp_path):
    ours = tmp_path / "ours.gguf"
    convert(build("qwen3_moe", tmp_path / "model"), ours, "f32")
    (norm,) = (t.data for t in GGUFReader(ours).tensors if t.name == "output_norm.weight")
    tensors = {
        "output_norm.weight": norm + 1, "blk.0.attn_q.weight": None,
        "blk.0.new.weight": np.ones(64, np.float32),
    }  # fmt: skip
    keys = {"qwen3moe.expert_used_count": (T.UINT32, 2)}
    theirs = rewrite(ours, tmp_path / "theirs.gguf", keys, **tensors)
    assert differences(ours, ours) == []
    assert differences(theirs, ours) == [
        "only theirs: blk.0.new.weight",
        "only ours: blk.0.attn_q.weight",
        "output_norm.weight: [64], ours [64]",
        "qwen3moe.expert_used_count: 2, ours 3",
    ]
