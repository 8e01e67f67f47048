"""Measures what a pass over a tail behind a long known prefix takes, in a process of its own: in
another the heap has gaps that earlier tests left, and the peak depends on them.

    python -m tests.memory.pass_peak grouped 1500 inexact bfloat16
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3MoeConfig
from transformers.cache_utils import DynamicCache

from moe_infinity.architectures.attention_inputs import cache_parameter
from moe_infinity.architectures.small_batch import SmallBatchSteps
from moe_infinity.memory.needs import SAFETY, StepBytes
from moe_infinity.memory.part_bytes import PartBytes
from moe_infinity.system.memory import return_free_memory
from tests.memory.conftest import M_MMAP_THRESHOLD

NUM_KNOWN = 6000
STATUS = Path("/proc/self/status")
PEAK = Path("/proc/self/clear_refs")  # 5 written into it begins a new one


def set_aside_large_blocks() -> None:
    """Each large block gets pages of its own, which go back as soon as it is freed."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)


def kept_bytes(name: str) -> int:
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10


def grouped() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=4,
        num_experts_per_tok=2, attn_implementation="sdpa",
    )  # fmt: skip


def latent() -> DeepseekV3Config:
    """Its values are narrower than its keys."""
    return DeepseekV3Config(
        vocab_size=64, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=8, kv_lora_rank=64, q_lora_rank=None,
        qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32, n_routed_experts=4, n_group=1,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=0, attn_implementation="sdpa",
    )  # fmt: skip


CONFIGS = {"grouped": grouped, "latent": latent}


def measure(name: str, num_new: int, dtype: torch.dtype, *, is_exact: bool) -> dict[str, float]:
    """Bytes: taken, estimated, and those of the new keys and values."""
    config = CONFIGS[name]()
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    needs = StepBytes.of(
        model.config,
        top_k=config.num_experts_per_tok,
        expert_params=3 * config.hidden_size * config.moe_intermediate_size,
        item_bytes=dtype.itemsize,
        kv_dtype="auto",
        is_exact=is_exact,
        part=PartBytes(),
    )
    steps = None if is_exact else SmallBatchSteps(model, None, "auto")
    ids = torch.zeros(1, num_new, dtype=torch.long)
    with torch.no_grad():
        # What stays is there after the first round, kernels that were compiled among it.
        for num_known in (500, NUM_KNOWN):
            name = cache_parameter(model.forward)
            given = {name: DynamicCache(), "logits_to_keep": 1, "use_cache": True}
            for some in ids.new_zeros(1, num_known).split(500, dim=1):
                model(some, **given)
            if num_known < NUM_KNOWN:
                model(ids, **given)
        return_free_memory()  # else it is taken again, and is no new memory
        PEAK.write_text("5")
        before = kept_bytes("VmRSS")
        model(ids, **given)
    taken = kept_bytes("VmHWM") - before
    estimated = needs.of_pass(num_new, NUM_KNOWN + num_new) / SAFETY
    if steps is not None:
        steps.close()
    return {"taken": taken, "estimated": estimated, "kept": needs.kv.of(num_new)}


if __name__ == "__main__":
    torch.set_num_threads(2)
    name, num_new, mode, dtype = sys.argv[1:]
    set_aside_large_blocks()
    found = measure(name, int(num_new), getattr(torch, dtype), is_exact=mode == "exact")
    sys.stdout.write(json.dumps(found))
