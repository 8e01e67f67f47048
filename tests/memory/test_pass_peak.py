"""A pass over a tail behind a long known prefix takes no more memory than was estimated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.cache_utils import DynamicCache

from moe_infinity.architectures.attention_inputs import cache_parameter
from moe_infinity.memory.needs import StepBytes

NUM_KNOWN = 6000
NUM_NEW = 15
ELSEWHERE_BYTES = 16 << 20  # heaps of threads
STATUS = Path("/proc/self/status")
PEAK = Path("/proc/self/clear_refs")  # 5 written into it begins a new one


def kept_bytes(name: str) -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


@pytest.mark.skipif(not PEAK.exists(), reason="this system does not tell the peak of a part")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tail_behind_a_known_prefix_takes_no_more_than_was_estimated(dtype):
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=4,
        num_experts_per_tok=2, attn_implementation="sdpa",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    needs = StepBytes.of(
        model.config,
        top_k=config.num_experts_per_tok,
        expert_params=3 * config.hidden_size * config.moe_intermediate_size,
        item_bytes=dtype.itemsize,
        kv_dtype="auto",
    )
    cache = DynamicCache()
    keys_1HTd = torch.zeros(1, 4, NUM_KNOWN, 128, dtype=dtype)
    cache.update(keys_1HTd, keys_1HTd.clone(), 0)
    ids = torch.zeros(1, NUM_NEW, dtype=torch.long)
    with torch.no_grad():
        model(ids, logits_to_keep=1)  # what stays is there now
        PEAK.write_text("5")
        before = kept_bytes("VmRSS")
        model(ids, **{cache_parameter(model.forward): cache}, logits_to_keep=1)
    taken = kept_bytes("VmHWM") - before
    estimated = needs.of_pass(NUM_NEW, NUM_KNOWN + NUM_NEW)
    assert taken <= estimated + needs.kv.of(NUM_NEW) + ELSEWHERE_BYTES
    assert taken > estimated // 2, "else it is no test"
