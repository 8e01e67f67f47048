"""Tiny random models that see images, with a processor and a chat template in the manner of the
real ones, and what stock transformers makes of a conversation.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moe_infinity.images.processor import load_processor
from tests.closeness import margin
from tests.sweep import tiny
from tests.sweep.discover import Architecture, architectures_in
from tests.sweep.overrides import OVERRIDES

TIE = 2e-4  # of logits in float32: as near as that, another arithmetic may choose otherwise
CHATML = (
    "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
    "{% for m in messages %}<turn> {{ m['role'] }} {% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "PLACE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %} <end> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant {% endif %}"
)


@dataclass(frozen=True)
class Eyes:
    """One architecture: its folder in transformers, its special tokens, how a template shows an
    image, changes of the tiny config, and the files of its processor."""

    folder: str
    tokens: tuple[str, ...]
    place: str
    config: Callable[[dict[str, int]], dict[str, Any]]
    processor: dict[str, Any]
    tokenizer: dict[str, str] = field(default_factory=dict)

    @property
    def architecture(self) -> Architecture:
        found = architectures_in(self.folder)
        return next(each for each in found if each.name.endswith("ForConditionalGeneration"))


QWEN_PIXELS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 16 * 32 * 32},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
QWEN_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_PLACE = "<|vision_start|><|image_pad|><|vision_end|>"


def qwen_config(ids: dict[str, int]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "text_config": {
            "rope_parameters": rope,
            "sliding_window": None,  # its attention ignores one, and no real model has one
            "max_position_embeddings": 1024,
        },
        "vision_config": {
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 16,
            "patch_size": 16,
        },
    }


EYES = {
    "qwen3_vl_moe": Eyes("qwen3_vl_moe", QWEN_TOKENS, QWEN_PLACE, qwen_config, QWEN_PIXELS),
}


def save_checkpoint(eyes: Eyes, folder: Path) -> Path:
    """A checkpoint in float32, with a tokenizer and a processor."""
    ids = save_tokenizer(eyes, folder)
    architecture = eyes.architecture
    arguments = tiny.shrink(architecture.config_class())
    changes = tiny.merge(OVERRIDES.get(architecture.name, {}), eyes.config(ids))
    config = architecture.config_class(**tiny.merge(arguments, changes))
    model = tiny.random_model(architecture, config).to(torch.float32)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(eyes.processor))
    return folder


def save_tokenizer(eyes: Eyes, folder: Path) -> dict[str, int]:
    """One token a word, w0, w1 ..., and the special ones. Returns the ids."""
    words = ["<unk>", "<pad>", "<turn>", "<end>", "user", "assistant", "system", "tool", "fetch"]
    words += [*eyes.tokens, *(f"w{number}" for number in range(tiny.VOCAB_SIZE))]
    words = words[: tiny.VOCAB_SIZE]
    ids = {word: at for at, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in eyes.tokens])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        chat_template=CHATML.replace("PLACE", eyes.place),
        **eyes.tokenizer,
    ).save_pretrained(folder)
    return ids


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def stock_inputs(
    folder: Path, messages: list[dict[str, Any]], images: list[Image.Image]
) -> dict[str, Any]:
    """What transformers makes of a conversation whose contents have parts of type image."""
    model = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, model.architectures[0])
    with torch.device("meta"):
        empty = kind(model)
    processor = load_processor(empty, str(folder), config_from=None, trust_remote_code=False)
    text = processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    made = processor(text=[text], images=[images] if images else None, return_tensors="pt")
    return dict(made)


def stock_answer(
    folder: Path, messages: list[dict[str, Any]], images: list[Image.Image], num_new: int = 12
) -> list[int]:
    """The tokens with which stock transformers answers, none of which is near to a tie."""
    inputs = stock_inputs(folder, messages, images)
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    stock = kind.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        out = stock.generate(
            **inputs,
            max_new_tokens=num_new,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    assert margin(torch.cat(out.logits)) > TIE, "take another prompt"
    found: list[int] = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    return found
