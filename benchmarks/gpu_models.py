"""Random checkpoints in the shapes of known models, with fewer layers, drawn on a GPU."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

ROUTER_SCALE = 3.0  # standard deviation of the router logits
# Of the logarithm of an expert's logits' size. It gives experts of their own popularity: the 30 %
# that are asked for most get 72 % of the lookups of a top-8 router of 128.
POPULARITY = 0.5
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
        transformers.GptOssForCausalLM,
    )
}  # fmt: skip
OF_ALL = {"vocab_size": 32768, "max_position_embeddings": 16384}
TINY = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
NO_END = {"dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None}


def qwen3(layers: int, *, is_tiny: bool = False) -> Any:
    """Qwen3-30B-A3B: 48 layers of 128 experts of 9.4 MB, 8 per token."""
    sizes = {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "intermediate_size": 6144,
    }  # fmt: skip
    tiny = TINY | {
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "intermediate_size": 64,
    }  # fmt: skip
    return transformers.Qwen3MoeConfig(
        num_hidden_layers=layers, norm_topk_prob=True, tie_word_embeddings=False,
        **OF_ALL | NO_END | sizes | (tiny if is_tiny else {}),
    )  # fmt: skip


def deepseek_v2_lite(layers: int, *, is_tiny: bool = False) -> Any:
    """DeepSeek-V2-Lite: 26 MoE layers of 64 experts of 17.3 MB, 6 per token, 2 shared ones."""
    sizes = {
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    tiny = TINY | {
        "intermediate_size": 96, "moe_intermediate_size": 32, "num_key_value_heads": 4,
        "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    }  # fmt: skip
    return transformers.DeepseekV2Config(
        num_hidden_layers=layers + 1, first_k_dense_replace=1, topk_method="greedy",
        norm_topk_prob=False, routed_scaling_factor=1.0, tie_word_embeddings=False,
        **OF_ALL | NO_END | sizes | (tiny if is_tiny else {}),
    )  # fmt: skip


def gpt_oss(layers: int, *, is_tiny: bool = False) -> Any:
    """gpt-oss-20b: 24 layers of 32 experts of 13.2 MB in MXFP4, 4 per token."""
    tiny = TINY | {
        "intermediate_size": 96, "head_dim": 16, "num_key_value_heads": 2, "sliding_window": 64,
    }  # fmt: skip
    return transformers.GptOssConfig(
        num_hidden_layers=layers, num_local_experts=32, num_experts_per_tok=4,
        **OF_ALL | NO_END | (tiny if is_tiny else {}),
    )  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One model, of which so many MoE layers are built."""

    name: str
    make_config: Callable[..., Any]  # layers -> config
    layers: int
    full_layers: int  # MoE layers of the real one
    total_gb: float  # all experts of the real one
    is_tiny: bool = False

    @property
    def folder(self) -> str:
        return f"{self.name}-{self.layers}"

    @property
    def num_bytes(self) -> int:
        return int(self.total_gb * 1e9 * self.layers / self.full_layers)

    @property
    def config(self) -> Any:
        return self.make_config(self.layers, is_tiny=self.is_tiny)

    @property
    def active_share(self) -> float:
        """Of the experts, for one token."""
        names = ("num_experts", "n_routed_experts", "num_local_experts")
        num = next(getattr(self.config, name) for name in names if hasattr(self.config, name))
        return float(self.config.num_experts_per_tok / num)


def sizes_of(folder: Path) -> dict[str, int]:
    """Bytes of a checkpoint: "experts"; the "embedding", of which a token reads a row; the "rest",
    which every token reads.
    """
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sizes: dict[str, int] = index["metadata"]["sizes"]
    return sizes


def drawn(name: str, shape: tuple[int, ...], device: str, *, is_mxfp4: bool) -> dict[str, Tensor]:
    """What the checkpoint has of a parameter: experts [E, C, R] of MXFP4 in blocks of 32 columns,
    with one exponent each, which is one of two.
    """
    if is_mxfp4 and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        num_experts, columns, rows = shape
        grid = num_experts, rows, columns // 32
        exponent = 127 + round(math.log2(columns**-0.5 / FP4_RMS) - 0.5)
        bytes_of = {"blocks": (0, 256, (*grid, 16)), "scales": (exponent, exponent + 2, grid)}
        return {
            f"{name}_{part}": torch.randint(*given, dtype=torch.uint8, device=device)
            for part, given in bytes_of.items()
        }
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if len(shape) == 1:
        return {name: tensor.fill_(1.0) if "norm" in name else tensor.normal_(std=0.02)}
    if "embed_tokens" in name:
        return {name: tensor.normal_()}
    tensor.normal_(std=shape[-1] ** -0.5)
    if name.endswith(("gate.weight", "router.weight")):
        tensor *= ROUTER_SCALE * torch.exp(POPULARITY * torch.randn_like(tensor[:, :1]))
    return {name: tensor}


def write_checkpoint(folder: Path, config: Any, device: str = "cpu") -> None:
    """In the layout of transformers' own class, experts stacked, gpt-oss as it is published; a file
    for each layer. The folder is there once all of it is.
    """
    unfinished = folder.with_suffix(".unfinished")
    unfinished.mkdir(parents=True)
    is_mxfp4 = config.model_type == "gpt_oss"
    with torch.device("meta"):
        model = MODELS[type(config)](config)
    config.architectures = [type(model).__name__]
    if is_mxfp4:
        config.quantization_config = MXFP4
    config.save_pretrained(unfinished)
    parameters_by_file: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    for name, parameter in model.state_dict().items():
        layer = re.search(r"layers\.(\d+)\.", name)
        file = f"model-{layer[1] if layer else 'rest'}.safetensors"
        parameters_by_file[file].append((name, parameter))
    torch.manual_seed(0)
    files: dict[str, str] = {}
    sizes = {"experts": 0, "embedding": 0, "rest": 0}
    for file, parameters in parameters_by_file.items():
        tensors: dict[str, Tensor] = {}
        for name, parameter in parameters:
            tensors |= drawn(name, tuple(parameter.shape), device, is_mxfp4=is_mxfp4)
        save_file(tensors, unfinished / file, metadata={"format": "pt"})
        for name, tensor in tensors.items():
            files[name] = file
            is_expert, is_embedding = ".experts." in name, "embed_tokens" in name
            kind = "experts" if is_expert else "embedding" if is_embedding else "rest"
            sizes[kind] += tensor.nbytes
    index = {"metadata": {"sizes": sizes}, "weight_map": files}
    (unfinished / "model.safetensors.index.json").write_text(json.dumps(index))
    unfinished.rename(folder)


def token_ids(vocab: int, batch: int, length: int, seed: int = 0) -> Tensor:
    """[B, T]: few ids are frequent, as in text."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(batch, length, generator=generator)
    return (vocab**uniform).long().clamp(0, vocab - 1)
