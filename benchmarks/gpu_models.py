"""Random checkpoints in the shapes of known models, with fewer layers, written fast."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers

POOL_LENGTH = (1 << 24) - 3  # prime: tensors that wrap around do not repeat row by row
POOL_STEP = 1_299_709
ROUTER_SCALE = 3.0  # standard deviation of the router logits
SCRATCH = Path("/dev/shm")  # where there is room for it: writing to disk takes minutes


@dataclass(frozen=True)
class Shape:
    """One model: all its layers, and those that are built."""

    name: str
    full_layers: int  # MoE layers of the real one
    layers: int
    make_config: Any  # layers -> config

    @property
    def config(self) -> Any:
        return self.make_config(self.layers)


def qwen3(layers: int, *, is_tiny: bool = False) -> Any:
    """Qwen3-30B-A3B: 48 layers of 128 experts of 9.4 MB, 8 per token."""
    sizes = {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "vocab_size": 32768, "max_position_embeddings": 16384, "intermediate_size": 6144,
    }  # fmt: skip
    tiny = {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "vocab_size": 256, "intermediate_size": 64,
    }  # fmt: skip
    return transformers.Qwen3MoeConfig(
        num_hidden_layers=layers, norm_topk_prob=True, tie_word_embeddings=False,
        dtype="bfloat16", bos_token_id=None, eos_token_id=None, **sizes | (tiny if is_tiny else {})
    )  # fmt: skip


def deepseek_v2_lite(layers: int, *, is_tiny: bool = False) -> Any:
    """DeepSeek-V2-Lite: 26 MoE layers of 64 experts of 17.3 MB, 6 per token, 2 shared ones."""
    sizes = {
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 32768,
        "max_position_embeddings": 16384,
    }  # fmt: skip
    tiny = {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
        "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 16,
        "num_experts_per_tok": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 256,
    }  # fmt: skip
    return transformers.DeepseekV2Config(
        num_hidden_layers=layers + 1, first_k_dense_replace=1, topk_method="greedy",
        norm_topk_prob=False, routed_scaling_factor=1.0, tie_word_embeddings=False,
        dtype="bfloat16", bos_token_id=None, eos_token_id=None, **sizes | (tiny if is_tiny else {})
    )  # fmt: skip


class Pool:
    """Normal numbers; every tensor is a stretch of them, starting somewhere else."""

    def __init__(self) -> None:
        self._normal = torch.randn(POOL_LENGTH, generator=torch.Generator().manual_seed(0))
        self._scaled: dict[float, Any] = {}
        self._num_written = 0

    def stretches(self, length: int, scale: float) -> Iterator[memoryview]:
        if scale not in self._scaled:
            values = self._normal * scale if scale else torch.ones(POOL_LENGTH)
            self._scaled[scale] = values.bfloat16().view(torch.int16).numpy()
        start, left = self._num_written * POOL_STEP % POOL_LENGTH, length
        self._num_written += 1
        while left:
            stretch = self._scaled[scale][start : start + left]
            yield stretch.data
            start, left = 0, left - len(stretch)


def scale_of(name: str, shape: list[int]) -> float:
    """0 for ones."""
    if len(shape) == 1:
        return 0.0
    if "embed_tokens" in name:
        return 1.0
    scale = ROUTER_SCALE if name.endswith("gate.weight") else 1.0
    return scale * float(shape[-1]) ** -0.5


def write_checkpoint(folder: Path, config: Any) -> None:
    """In the layout of transformers' own class: experts stacked."""
    folder.mkdir(parents=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pool = Pool()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            for stretch in pool.stretches(prod(shape), scale_of(name, shape)):
                file.write(stretch)


@contextmanager
def scratch_folder(num_bytes: int) -> Iterator[Path]:
    """In memory where there is room, else on disk; removed at the end."""
    has_room = SCRATCH.is_dir() and shutil.disk_usage(SCRATCH).free > 1.2 * num_bytes
    with tempfile.TemporaryDirectory(dir=SCRATCH if has_room else None) as folder:
        yield Path(folder)


def token_ids(vocab: int, length: int, seed: int = 0) -> torch.Tensor:
    """[1, length]: few ids are frequent, as in text."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(1, length, generator=generator)
    return (vocab**uniform).long().clamp(0, vocab - 1)
