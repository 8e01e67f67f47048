"""Random checkpoints in the shapes of known models, with fewer layers, written fast."""

from __future__ import annotations

import json
import math
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
FP4_RMS = 2.93  # of the 16 values that 4 bits stand for
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
# Imported here, before any process of a stage begins.
MODELS: dict[type, Any] = {
    model.config_class: model
    for model in (
        transformers.Qwen3MoeForCausalLM, transformers.DeepseekV2ForCausalLM,
        transformers.MixtralForCausalLM, transformers.GptOssForCausalLM,
    )
}  # fmt: skip
SCRATCH = Path("/dev/shm")  # where there is room for it: writing to disk takes minutes


@dataclass(frozen=True)
class Shape:
    """One model: all its layers, and those that are built."""

    name: str
    full_layers: int  # MoE layers of the real one
    layers: int
    total_gb: float  # all experts of the real one
    make_config: Any  # layers -> config
    trace: str | None = None  # of the real one: a folder of recorded requests

    @property
    def folder_bytes(self) -> int:
        return int(self.total_gb * 1e9 * self.layers / self.full_layers)

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
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 256,
    }  # fmt: skip
    return transformers.DeepseekV2Config(
        num_hidden_layers=layers + 1, first_k_dense_replace=1, topk_method="greedy",
        norm_topk_prob=False, routed_scaling_factor=1.0, tie_word_embeddings=False,
        dtype="bfloat16", bos_token_id=None, eos_token_id=None, **sizes | (tiny if is_tiny else {})
    )  # fmt: skip


def mixtral(layers: int, *, is_tiny: bool = False) -> Any:
    """Mixtral-8x7B: 32 layers of 8 experts of 352 MB, 2 per token."""
    sizes = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32000,
        "max_position_embeddings": 16384,
    }  # fmt: skip
    tiny = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256,
    }  # fmt: skip
    return transformers.MixtralConfig(
        num_hidden_layers=layers, num_experts_per_tok=2, tie_word_embeddings=False,
        dtype="bfloat16", bos_token_id=None, eos_token_id=None, **sizes | (tiny if is_tiny else {})
    )  # fmt: skip


def gpt_oss(layers: int, *, num_experts: int = 32, is_tiny: bool = False) -> Any:
    """gpt-oss-20b: 24 layers of 32 experts of 13.2 MB, 4 per token; 120b: 36 layers of 128."""
    sizes = {"vocab_size": 32768, "max_position_embeddings": 16384}
    tiny = {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "vocab_size": 256, "sliding_window": 64,
    }  # fmt: skip
    return transformers.GptOssConfig(
        num_hidden_layers=layers, num_local_experts=32 if is_tiny else num_experts,
        num_experts_per_tok=4, dtype="bfloat16", bos_token_id=None, eos_token_id=None,
        **sizes | (tiny if is_tiny else {}),
    )  # fmt: skip


class Pool:
    """Normal numbers and bytes; every tensor is a stretch of them, starting somewhere else."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._normal = torch.randn(POOL_LENGTH, generator=generator)
        self._bytes = torch.randint(256, (POOL_LENGTH,), dtype=torch.uint8, generator=generator)
        self._made: dict[tuple[str, float], Any] = {}
        self._num_written = 0

    def _numbers(self, tensor: Written) -> Any:
        key = tensor.dtype, tensor.scale
        if key not in self._made:
            if tensor.dtype == "BF16":
                values = self._normal * tensor.scale if tensor.scale else torch.ones(POOL_LENGTH)
                self._made[key] = values.bfloat16().view(torch.int16).numpy()
            else:  # all bytes, or exponents that are one of two
                exponents = self._bytes % 2 + int(tensor.scale)
                self._made[key] = (exponents if tensor.scale else self._bytes).numpy()
        return self._made[key]

    def stretches(self, tensor: Written) -> Iterator[memoryview]:
        start, left = self._num_written * POOL_STEP % POOL_LENGTH, prod(tensor.shape)
        self._num_written += 1
        while left:
            stretch = self._numbers(tensor)[start : start + left]
            yield stretch.data
            start, left = 0, left - len(stretch)


@dataclass(frozen=True)
class Written:
    """One tensor of a checkpoint."""

    dtype: str  # BF16 or U8
    shape: tuple[int, ...]
    scale: float  # standard deviation, 0: ones; of bytes the exponent, 0: any

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * (2 if self.dtype == "BF16" else 1)


def scale_of(name: str, shape: tuple[int, ...]) -> float:
    """0 for ones."""
    if len(shape) == 1:
        return 0.0 if "norm" in name else 0.02
    if "embed_tokens" in name:
        return 1.0
    scale = ROUTER_SCALE if name.endswith(("gate.weight", "router.weight")) else 1.0
    return scale / math.sqrt(shape[-1])


def written_as(name: str, shape: tuple[int, ...], *, is_mxfp4: bool) -> dict[str, Written]:
    """What the checkpoint has of a parameter: experts [E, C, R] of MXFP4 in blocks of 32 columns,
    with one exponent each.
    """
    if not (is_mxfp4 and name.endswith(("experts.gate_up_proj", "experts.down_proj"))):
        return {name: Written("BF16", shape, scale_of(name, shape))}
    num_experts, columns, rows = shape
    grid = num_experts, rows, columns // 32
    exponent = 127 + round(math.log2(columns**-0.5 / FP4_RMS) - 0.5)
    blocks, scales = Written("U8", (*grid, 16), 0.0), Written("U8", grid, float(exponent))
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def write_checkpoint(folder: Path, config: Any) -> None:
    """In the layout of transformers' own class: experts stacked. gpt-oss as it is published."""
    folder.mkdir(parents=True)
    is_mxfp4 = config.model_type == "gpt_oss"
    with torch.device("meta"):
        model = MODELS[type(config)](config)
    config.architectures = [type(model).__name__]
    if is_mxfp4:
        config.quantization_config = MXFP4
    config.save_pretrained(folder)
    tensors: dict[str, Written] = {}
    for name, tensor in model.state_dict().items():
        tensors |= written_as(name, tuple(tensor.shape), is_mxfp4=is_mxfp4)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, written in tensors.items():
        begin, end = end, end + written.num_bytes
        header[name] = {
            "dtype": written.dtype, "shape": written.shape, "data_offsets": [begin, end],
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pool = Pool()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for written in tensors.values():
            for stretch in pool.stretches(written):
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
