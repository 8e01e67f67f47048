"""Tokenizers of GGUF files: the ids of the tokenizer.json that a file was made from.

Each original is trained here on a little text, and written as llama.cpp's converter does.
benchmarks/gguf_tokenizers.py does the same with tokenizers of real models, and asks llama.cpp.
"""

from __future__ import annotations

import json
import logging
import time
import tracemalloc
from typing import Any

import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from moe_infinity import CheckpointError, UnsupportedModelError
from moe_infinity.gguf.splitting import SPLITTINGS
from moe_infinity.gguf.tokenizer import tokenizer_of
from tests.checkpoint.gguf_originals import (
    CORPUS,
    GPT4O,
    ORIGINALS,
    TEXTS,
    byte_level,
    differing,
    gguf_of,
    sentencepiece,
    written,
)
from tools.vocabulary_to_gguf import (
    CONTROL,
    NORMAL,
    UNKNOWN,
)


@pytest.mark.parametrize("pre", ORIGINALS)
def test_a_byte_level_tokenizer_gives_the_ids_and_texts_of_its_original(pre):
    original = byte_level(pre)
    assert differing(original, tokenizer_of(gguf_of(written(original, pre)))) == []


@pytest.mark.parametrize("has_prefix", [True, False])
def test_a_sentencepiece_tokenizer_gives_the_ids_and_texts_of_its_original(has_prefix):
    original = sentencepiece(has_prefix=has_prefix)
    assert differing(original, tokenizer_of(gguf_of(written(original, "")))) == []


def test_a_tokenizer_of_characters_gives_the_ids_of_its_original():
    """Gemma 4: as SentencePiece, but the file has merges."""
    original = sentencepiece(has_prefix=False)
    metadata = written(original, "gemma4") | {"tokenizer.ggml.model": "gemma4"}
    found = tokenizer_of(gguf_of(metadata | {"tokenizer.ggml.bos_token_id": 1}))
    assert differing(original, found) == []
    assert found("hi").input_ids[0] == 1  # whatever the flag says


def test_a_unigram_tokenizer_gives_the_ids_of_its_original():
    original = Tokenizer(models.Unigram())
    strip = normalizers.Strip(left=False, right=True)
    original.normalizer = normalizers.Sequence([strip, normalizers.Replace(Regex(" {2,}"), " ")])
    original.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=2500, unk_token="<unk>", special_tokens=["<pad>", "</s>", "<unk>"],
        show_progress=False,
    )  # fmt: skip
    original.train_from_iterator(CORPUS, trainer)
    vocab = json.loads(original.to_str())["model"]["vocab"]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [text for text, _ in vocab],
        "tokenizer.ggml.scores": [score for _, score in vocab],
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, UNKNOWN] + [NORMAL] * (len(vocab) - 3),
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.add_space_prefix": True,
    }
    found = tokenizer_of(gguf_of(metadata))
    assert [found(text, add_special_tokens=False).input_ids for text in TEXTS] == [
        original.encode(text).ids for text in TEXTS
    ]
    assert found("x").input_ids[-1] == 1  # </s>


@pytest.mark.parametrize("pre", SPLITTINGS)
def test_every_way_of_splitting_loses_nothing(pre, qwen):
    if not SPLITTINGS[pre].is_byte_level:
        pytest.skip("of characters")
    found = tokenizer_of(gguf_of(qwen | {"tokenizer.ggml.pre": pre}))
    composed = normalizers.NFC().normalize_str
    for text in TEXTS[:60]:
        wanted = composed(text) if SPLITTINGS[pre].is_nfc else text
        assert found.decode(found(text, add_special_tokens=False).input_ids) == wanted


@pytest.mark.parametrize(
    ("pre", "number"),
    [
        ("qwen2", "1 2 3 4 5 6 7"), ("llama-bpe", "123 456 7"), ("afmoe", "1 234 567"),
        ("superbpe", "1 234 567"), ("tiny_aya", "1 234 567"), ("minicpm5", "123 456 7"),
        ("deepseek-llm", "1234567"), ("gpt-2", "1234567"), ("viking", "1 2 3 4 5 6 7"),
    ],
)  # fmt: skip
def test_numbers_are_cut_as_the_name_says(pre, number, qwen):
    backend = tokenizer_of(gguf_of(qwen | {"tokenizer.ggml.pre": pre})).backend_tokenizer
    found = backend.pre_tokenizer.pre_tokenize_str("1234567")
    assert " ".join(word for word, _ in found) == number


# Of numbers, by the tokenizer.json of cohere2moe and tiny_aya.
CUT = [
    "500|0|km", "108|0|p", "1|234|567", "123|4|_|5", "x|1|234|567", "_|123|456|7|_",
    "v|1|.|23|456|-rc", "1|,|234|567| (|12|345|)", "123|45|a| |67|890", "123|4²",
    "\u0661|\u0662\u0663\u0664", "123|4|e\u0301", "\n| |1|234|\t|5", " | |500|0|km",
]  # fmt: skip
SPACED = ["a  5", "x    123456 y", "\n   7.25", "1,  234567k", "rc1  77", "    12²"]


def cut(splitter: pre_tokenizers.PreTokenizer, text: str) -> str:
    return "|".join(text[slice(*extent)] for _, extent in splitter.pre_tokenize_str(text))


@pytest.fixture(scope="module")
def groups_of_words() -> pre_tokenizers.PreTokenizer:
    """That of the original, whose first pattern stands before that of GPT-4o."""
    patterns = (r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O)
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    )


@pytest.mark.parametrize("pre", ["cohere2moe", "tiny_aya"])
def test_digits_before_a_letter_are_cut_from_the_left(pre, qwen, groups_of_words):
    found = tokenizer_of(gguf_of(qwen | {"tokenizer.ggml.pre": pre})).backend_tokenizer
    for number in CUT:
        text = number.replace("|", "")
        assert cut(groups_of_words, text) == number
        assert cut(found.pre_tokenizer, text) == number


def test_spaces_before_a_number_are_cut_as_by_the_original(qwen, groups_of_words):
    """Its first pattern leaves them at the end of a piece, where they are one word."""
    found = tokenizer_of(gguf_of(qwen | {"tokenizer.ggml.pre": "cohere2moe"})).backend_tokenizer
    differing = [
        text
        for text in (*SPACED, *TEXTS)
        if cut(found.pre_tokenizer, text) != cut(groups_of_words, text)
    ]
    assert differing == []


@pytest.mark.parametrize("pre", ["afmoe", "superbpe", "tiny_aya"])
def test_groups_counted_from_the_right_take_no_longer_for_each_digit_of_a_long_number(pre, qwen):
    """The pattern of their tokenizer.json looks to the end of the number for each group."""
    backend = tokenizer_of(gguf_of(qwen | {"tokenizer.ggml.pre": pre})).backend_tokenizer
    start = time.process_time()
    found = backend.pre_tokenizer.pre_tokenize_str("1" * 100_000)
    assert time.process_time() - start < 5  # of 0.4 s, else 15 s
    assert [len(word) for word, _ in found] == [1, *[3] * 33_333]


def test_an_unknown_way_of_splitting_is_refused(qwen):
    with pytest.raises(UnsupportedModelError, match=r"pre is 'new-one'.*\n.*--config"):
        tokenizer_of(gguf_of(qwen | {"tokenizer.ggml.pre": "new-one"}))


def test_a_file_older_than_the_key_is_split_as_its_architecture_or_warned_of(qwen, caplog):
    del (metadata := dict(qwen))["tokenizer.ggml.pre"]
    found = tokenizer_of(gguf_of(metadata))
    assert caplog.records == []
    assert found("I'm 12").input_ids == tokenizer_of(gguf_of(qwen))("I'm 12").input_ids
    with caplog.at_level(logging.WARNING):
        tokenizer_of(gguf_of(metadata | {"general.architecture": "granitemoe"}))
    assert "tokenizer.ggml.pre" in caplog.text


def test_an_unknown_model_and_no_vocabulary_are_refused(qwen):
    with pytest.raises(UnsupportedModelError, match=r"'rwkv'(.|\n)*--config"):
        tokenizer_of(gguf_of(qwen | {"tokenizer.ggml.model": "rwkv"}))
    for odd in ([], ["gpt2"], 1, True):
        with pytest.raises(CheckpointError, match="expected a text"):
            tokenizer_of(gguf_of(qwen | {"tokenizer.ggml.model": odd}))
    for metadata in ({}, {"tokenizer.ggml.model": "no_vocab"}):
        with pytest.raises(CheckpointError, match="no vocabulary"):
            tokenizer_of(gguf_of(metadata))


@pytest.mark.parametrize("model", ["gpt2", "rwkv"])
def test_the_original_tokenizer_is_used_if_the_file_has_it(model, qwen, caplog):
    """Its splitting, here one at every character, is in no other key."""
    original = byte_level("qwen2")
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("", "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    metadata = qwen | {
        "tokenizer.ggml.model": model, "tokenizer.huggingface.json": original.to_str(),
        "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    found = tokenizer_of(gguf_of(metadata))
    for text in ("the hello", "<|im_end|>the"):
        assert found(text).input_ids == [found.bos_token_id, *original.encode(text).ids]
    assert found.decode(found("the<|im_end|>").input_ids, skip_special_tokens=True) == "the"
    assert caplog.records == []


def test_an_original_of_other_tokens_is_left_out(qwen, caplog):
    expected = tokenizer_of(gguf_of(qwen))("the hello").input_ids
    for other in ("{}", 5, byte_level("tekken").to_str().replace('"!"', '"?!"')):
        found = tokenizer_of(gguf_of(qwen | {"tokenizer.huggingface.json": other}))
        assert found("the hello").input_ids == expected
    assert caplog.text.count("ignored") == 3


def with_original(metadata: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """With a tokenizer.json of the same tokens in which something else is changed."""
    content = json.loads(byte_level("qwen2").to_str()) | changes
    return metadata | {"tokenizer.huggingface.json": json.dumps(content)}


@pytest.mark.parametrize("strategy", [{"Fixed": 1 << 40}, "BatchLongest"])
def test_an_original_is_used_without_its_padding(strategy, qwen, caplog):
    """The library ends the process where there is no memory for it."""
    padding = {
        "strategy": strategy, "direction": "Right", "pad_to_multiple_of": 1 << 40, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "!",
    }  # fmt: skip
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    changed = with_original(qwen, padding=padding, truncation=truncation)
    found = tokenizer_of(gguf_of(changed | {"tokenizer.ggml.model": "rwkv"}))
    assert found("the hello").input_ids == tokenizer_of(gguf_of(qwen))("the hello").input_ids
    assert found.backend_tokenizer.padding is None
    assert caplog.records == []


PANICS = {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}
TOO_HIGH = {
    "id": 1 << 31, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False,
    "normalized": False, "special": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"normalizer": PANICS}, "index out of bounds"),
        ({"added_tokens": [TOO_HIGH]}, "an id of added_tokens is 2147483648"),
        ({"model": {"type": "BPE", "vocab": {"a": 1 << 31}, "merges": []}}, "is 2147483648"),
        ({"model": "BPE"}, "expected an object"),
    ],
    ids=["it panics", "an id of an added token", "an id of the vocabulary", "no model"],
)
def test_an_original_that_panics_or_has_impossible_ids_is_left_out(changes, said, qwen, caplog):
    found = tokenizer_of(gguf_of(with_original(qwen, **changes)))
    assert found("the hello").input_ids == tokenizer_of(gguf_of(qwen))("the hello").input_ids
    assert "ignored" in caplog.text
    assert said in caplog.text


@pytest.mark.parametrize("charsmap", [[0, 0, 0, 0], [1], ["a"], 5])
def test_a_table_of_characters_that_is_none_is_refused(charsmap):
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<pad>", "</s>", "<unk>", "a"],
        "tokenizer.ggml.token_type": [CONTROL, CONTROL, UNKNOWN, NORMAL],
        "tokenizer.ggml.precompiled_charsmap": charsmap,
    }
    with pytest.raises(CheckpointError, match="no tokenizer can be made of its vocabulary"):
        tokenizer_of(gguf_of(metadata))


# merges made of scores


def with_tokens(metadata: dict[str, Any], added: list[str]) -> dict[str, Any]:
    """With ordinary tokens more, of the lowest score."""
    more: dict[str, list[Any]] = {
        "tokens": added, "token_type": [NORMAL] * len(added), "scores": [-1e9] * len(added),
    }  # fmt: skip
    keys = {f"tokenizer.ggml.{name}": values for name, values in more.items()}
    return metadata | {key: [*metadata[key], *values] for key, values in keys.items()}


@pytest.mark.parametrize("length", [513, 1 << 20])
def test_a_token_longer_than_any_of_sentencepiece_is_refused(length, llama):
    """Time grows by the square of its length."""
    start = time.process_time()
    with pytest.raises(CheckpointError, match="tokens of more than 512 characters"):
        tokenizer_of(gguf_of(with_tokens(llama, ["a" * length])))
    assert time.process_time() - start < 5


def test_a_long_token_is_taken(llama):
    found = tokenizer_of(gguf_of(with_tokens(llama, ["q" * 256, "q" * 512])))
    assert len(found) == len(llama["tokenizer.ggml.tokens"]) + 2


def test_tokens_that_too_many_pairs_make_are_refused_before_they_fill_memory(llama):
    """Each of these is made of all that are shorter."""
    metadata = with_tokens(llama, ["q" * length for length in range(2, 500)])
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="more than 32 pairs"):
            tokenizer_of(gguf_of(metadata))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 << 20
