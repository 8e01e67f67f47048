"""Tokenizers that are trained here on a little text, and written as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from moe_infinity.gguf.file import GgufModel
from tests.hard_texts import hard_texts
from tools.vocabulary_to_gguf import (
    metadata_of,
)

CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<｜User｜>"]
ADDED_TOKENS = ["<think>", "</think>", "<tool_call>", "  \n"]
CORPUS = [text.replace("<0x0A>", "") for text in hard_texts(400, seed=1)]
TEXTS = hard_texts(250, [*CONTROL_TOKENS, *ADDED_TOKENS], seed=2)
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4O = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # noqa: E501
TEKKEN = GPT4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
DEEPSEEK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""  # noqa: E501
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
SINGLE_DIGITS = pre_tokenizers.Digits(individual_digits=True)
# How tokenizer.json of a model with that name in tokenizer.ggml.pre says it.
ORIGINALS: dict[str, list[Any]] = {
    "gpt-2": [WORDS],
    "starcoder": [SINGLE_DIGITS, WORDS],
    "command-r": [SINGLE_DIGITS, WORDS],
    "qwen2": [QWEN2],
    "llama-bpe": [LLAMA3],
    "gpt-4o": [GPT4O],
    "tekken": [TEKKEN],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK],
    "deepseek-coder": [
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", SINGLE_DIGITS,
    ],
}  # fmt: skip
COMPOSED = ("qwen2", "command-r")
WHOLE_WORDS = ("llama-bpe", "gpt-4o", "tekken")  # a word that is a token is not merged


def byte_level(pre: str) -> Tokenizer:
    original = Tokenizer(models.BPE(ignore_merges=pre in WHOLE_WORDS))
    if pre in COMPOSED:
        original.normalizer = normalizers.NFC()
    steps = [
        pre_tokenizers.Split(Regex(step), "isolated") if isinstance(step, str) else step
        for step in ORIGINALS[pre]
    ]
    if WORDS not in ORIGINALS[pre]:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    original.pre_tokenizer = pre_tokenizers.Sequence(steps)
    original.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    original.train_from_iterator(CORPUS, trainer)
    return with_added(original)


def with_added(original: Tokenizer) -> Tokenizer:
    original.add_special_tokens([AddedToken(t, normalized=False) for t in CONTROL_TOKENS])
    original.add_tokens([AddedToken(t, normalized=False) for t in ADDED_TOKENS])
    return original


def sentencepiece(*, has_prefix: bool) -> Tokenizer:
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.insert(0, normalizers.Prepend("▁"))
        back.append(decoders.Strip(" ", 1, 0))
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence(steps)
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+|▁+"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=900, limit_alphabet=300, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    order = [*merged, *(text for text in model["vocab"] if len(text) == 1)]
    vocab = {text: i for i, text in enumerate(dict.fromkeys([*PIECES, *order]))}
    # SentencePiece merges whatever pair makes the best token, as the library's converter does.
    merges = [
        (text[:end], text[end:])
        for text in merged
        for end in range(len(text) - 1, 0, -1)
        if text[:end] in vocab and text[end:] in vocab
    ]
    original = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    original.normalizer = normalizers.Sequence(steps)
    original.decoder = decoders.Sequence(back)
    original.add_special_tokens([AddedToken(t, normalized=False) for t in PIECES[:3]])
    return with_added(original)


def gguf_of(metadata: Mapping[str, Any]) -> GgufModel:
    general = {"general.architecture": "qwen3moe"}
    return GgufModel([Path("model.gguf")], general | dict(metadata), {}, {}, 0)


def written(original: Tokenizer, pre: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
    return metadata_of(json.loads(original.to_str()), config or {}, pre=pre)


def differing(original: Tokenizer, found: Any) -> list[str]:
    return [
        text
        for text in TEXTS
        if found(text, add_special_tokens=False).input_ids != original.encode(text).ids
        or found.decode(original.encode(text).ids)
        != original.decode(original.encode(text).ids, skip_special_tokens=False)
    ]
