"""Tiny Switch Transformers and NLLB-MoE checkpoints, in every layout such models are published in,
and what NLLB-MoE ought to compute."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

SWITCH: dict[str, Any] = {
    "vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_experts": 8,
    "num_layers": 4, "num_sparse_encoder_layers": 2,
    "num_decoder_layers": 4, "num_sparse_decoder_layers": 2,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
NLLB: dict[str, Any] = {
    "vocab_size": 128, "d_model": 32, "num_experts": 8, "max_position_embeddings": 128,
    "encoder_layers": 4, "encoder_ffn_dim": 48, "encoder_attention_heads": 4,
    "decoder_layers": 4, "decoder_ffn_dim": 48, "decoder_attention_heads": 4,
    "encoder_sparse_step": 2, "decoder_sparse_step": 2,
    "decoder_start_token_id": 2, "pad_token_id": 1, "bos_token_id": 3, "eos_token_id": None,
}  # fmt: skip
BUDGETS = ["3.2%", "50%", "100%"]  # the first is one slot: 32 experts in all
PROMPT = torch.arange(3, 3 + 26).view(2, 13) * 4 % 128  # two sequences
# No token twice: such small random models like one token so much that it would hide the rest.
GREEDY: dict[str, Any] = {
    "max_new_tokens": 20, "do_sample": False, "no_repeat_ngram_size": 1
}  # fmt: skip
CONFIGS = {"SwitchTransformers": SWITCH, "NllbMoe": NLLB}


def make_model(name: str, **changes: Any) -> Any:
    """Random and wide, less so the embeddings: they are the head, too, and repeat the input."""
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name] | changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for key, param in model.named_parameters():
            if param.ndim > 1:
                param.normal_(std=0.15 if "shared" in key else 0.5)
            elif "expert" in key:  # NLLB-MoE's have biases
                param.normal_(std=0.2)
    return model.eval()


def save_bin(model: Any, folder: Path, *, num_shards: int = 1) -> Path:
    """As transformers 4 did, which 5 does not any more: pickles, tied weights under all names."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = model.dtype
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tensors = model.state_dict()
    if num_shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    weight_map = {
        key: f"pytorch_model-{i % num_shards + 1:05}-of-{num_shards:05}.bin"
        for i, key in enumerate(tensors)
    }
    for file in set(weight_map.values()):
        shard = {key: tensors[key].clone() for key, at in weight_map.items() if at == file}
        torch.save(shard, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    return folder


def experts_one_after_the_other(
    self: Any, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor
) -> Tensor:
    """NLLB-MoE's experts as transformers 4 ran them: a token goes to every expert whose
    probability is not zero. A method for stock's NllbMoeExperts."""
    out_TD = torch.zeros_like(hidden_states)
    for expert_idx in range(self.num_experts):
        (t,) = torch.where(router_probs[:, expert_idx] != 0)
        rows = self[f"expert_{expert_idx}"](hidden_states[t]) * (1 - self.moe_token_dropout)
        out_TD[t] += rows * router_probs[t, expert_idx, None]
    return out_TD


def correct_stock(folder: Path) -> Any:
    """Stock transformers, its NLLB-MoE mended."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype="auto")
    for module in model.modules():
        if type(module).__name__ == "NllbMoeExperts":
            module.forward = partial(experts_one_after_the_other, module)
    return model


@torch.no_grad()
def forward_and_generate(model: Any) -> tuple[Tensor, ...]:
    """Logits with five decoder tokens each, 20 greedy tokens, and the logits of their choice."""
    mask = torch.ones_like(PROMPT)
    out = model.generate(
        PROMPT, attention_mask=mask, **GREEDY, output_logits=True, return_dict_in_generate=True
    )
    logits = model(input_ids=PROMPT, attention_mask=mask, decoder_input_ids=PROMPT[:, :5]).logits
    return logits, out.sequences, torch.stack(out.logits)
