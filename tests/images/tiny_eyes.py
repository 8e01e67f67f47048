"""Tiny random models that see images, with a processor and a chat template in the manner of the
real ones, and what stock transformers makes of a conversation.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import BatchFeature, PreTrainedTokenizerFast

from moe_infinity.config import OffloadConfig
from moe_infinity.images.processor import load_processor
from tests.closeness import margin
from tests.images.eyes import Eyes
from tests.sweep import tiny
from tests.sweep.overrides import OVERRIDES

TIE = 2e-4  # of logits in float32: as near as that, another arithmetic may choose otherwise
CHATML = (
    "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}"
    "{% for m in messages %}<turn> {{ m['role'] }} {% if m['content'] is string %}"
    "{{ m['content'] }}{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}"
    "PLACE{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %} <end> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant {% endif %}"
)


def save_checkpoint(
    eyes: Eyes, folder: Path, save: Callable[[Eyes, Path], dict[str, int]] | None = None
) -> Path:
    """A checkpoint in float32, with a processor and the tokenizer that `save` writes."""
    ids = (save or save_tokenizer)(eyes, folder)
    architecture = eyes.architecture
    arguments = tiny.shrink(architecture.config_class())
    changes = tiny.merge(OVERRIDES.get(architecture.name, {}), eyes.config(ids))
    config = architecture.config_class(**tiny.merge(arguments, changes))
    config.get_text_config().max_position_embeddings = 1024
    model = tiny.random_model(architecture, config)
    for parameter in model.parameters():  # not buffers: Llama 4 has complex ones
        parameter.data = parameter.float()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(eyes.processor))
    if eyes.more:
        (folder / "processor_config.json").write_text(json.dumps(eyes.more))
    return folder


def save_tokenizer(eyes: Eyes, folder: Path) -> dict[str, int]:
    """One token a word, w0, w1 ..., and the special ones. Returns the ids."""
    words = ["<unk>", "<pad>", "<turn>", "<end>", "user", "assistant", "system", "tool", "fetch"]
    words += [*eyes.tokens, *(f"w{number}" for number in range(tiny.VOCAB_SIZE))]
    words = words[: tiny.VOCAB_SIZE]
    ids = {word: at for at, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # transformers may take the vocabulary into a tokenizer of the model's own kind.
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in words[2:]])
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in eyes.tokens])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        chat_template=CHATML.replace("PLACE", eyes.place),
        extra_special_tokens=eyes.tokenizer,
    ).save_pretrained(folder)
    return ids


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def processor_of(folder: Path) -> Any:
    """The processor of a checkpoint, without its weights. Raises ConfigError."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    return load_processor(model, str(folder), OffloadConfig())


def stock_inputs(
    folder: Path, messages: list[dict[str, Any]], images: list[Image.Image]
) -> BatchFeature:
    """What transformers makes of a conversation whose contents have parts of type image."""
    processor = processor_of(folder)
    text = processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return processor(text=[text], images=[images] if images else None, return_tensors="pt")


class StockAnswer(NamedTuple):
    """The tokens with which stock transformers answers, and their log-probabilities."""

    ids: list[int]
    logprobs: list[float]


def stock_answer(
    folder: Path,
    messages: list[dict[str, Any]],
    images: list[Image.Image],
    num_new: int = 12,
    dtype: torch.dtype = torch.float32,
) -> StockAnswer:
    """No token is near to a tie in float32."""
    made = stock_inputs(folder, messages, images)
    inputs = made.to(dtype=dtype)  # as transformers' pipelines do
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = getattr(transformers, config.architectures[0])
    stock = kind.from_pretrained(folder, dtype=dtype).eval()
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    try:
        with torch.no_grad():
            out = stock.generate(**inputs, **options, max_new_tokens=num_new)
    except AttributeError as error:  # of every pass of Llama 4 in transformers 5.24
        if "image_outputs" not in str(error):
            raise
        pytest.skip(str(error))
    if dtype == torch.float32:
        assert margin(torch.cat(out.logits)) > TIE, "take another prompt"
    ids = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    of_all = torch.cat(out.logits).log_softmax(dim=-1)
    return StockAnswer(ids, [of_all[at, token].item() for at, token in enumerate(ids)])
