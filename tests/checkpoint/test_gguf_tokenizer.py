"""Tokenizers of GGUF files: the ids of the tokenizer.json that a file was made from.

Each original is trained here on a little text, and written as llama.cpp's converter does.
benchmarks/gguf_tokenizers.py does the same with tokenizers of real models, and asks llama.cpp.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
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

from moe_infinity import CheckpointError, UnsupportedModelError
from moe_infinity.checkpoint.gguf_file import GgufModel
from moe_infinity.checkpoint.gguf_splitting import SPLITTINGS
from moe_infinity.checkpoint.gguf_tokenizer import tokenizer_of
from tests.hard_texts import hard_texts
from tools.vocabulary_to_gguf import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
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
    return GgufModel([Path("model.gguf")], general | dict(metadata), {}, 0)


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


@pytest.fixture(scope="module")
def qwen() -> dict[str, Any]:
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return written(byte_level("qwen2"), "qwen2", config)


@pytest.fixture(scope="module")
def llama() -> dict[str, Any]:
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return written(sentencepiece(has_prefix=True), "", config)


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


# BOS and EOS


def test_bos_and_eos_are_added_where_the_file_says_so(llama, qwen):
    found = tokenizer_of(gguf_of(llama))
    assert found("hi").input_ids[:1] == [1]
    assert (found.bos_token, found.eos_token, found.unk_token) == ("<s>", "</s>", "<unk>")
    both = qwen | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    found = tokenizer_of(gguf_of(both))
    ids = found("hi").input_ids
    assert found.convert_ids_to_tokens([ids[0], ids[-1]]) == ["<|endoftext|>", "<|im_end|>"]
    assert found("hi", add_special_tokens=False).input_ids == ids[1:-1]


def test_without_the_flag_it_is_as_llama_cpp_has_it(llama, qwen):
    flag = "tokenizer.ggml.add_bos_token"
    for metadata, pre, expected in (
        (llama, "default", True), (qwen, "qwen2", False), (qwen, "llama-bpe", True),
        (qwen, "tekken", True), (qwen, "gpt-4o", False),
    ):  # fmt: skip
        metadata = {key: value for key, value in metadata.items() if key != flag}
        found = tokenizer_of(gguf_of(metadata | {"tokenizer.ggml.pre": pre}))
        assert (found("hi").input_ids[0] == found.bos_token_id) is expected


@pytest.mark.parametrize(
    ("value", "is_on"),
    [(1, True), (0, False), (1.0, True), ("true", True), ("False", False), ("0", False)],
)
def test_a_flag_may_be_a_number_or_a_text(value, is_on, qwen):
    found = tokenizer_of(gguf_of(qwen | {"tokenizer.ggml.add_bos_token": value}))
    assert (found("hi").input_ids[0] == found.bos_token_id) is is_on
    found = tokenizer_of(gguf_of(qwen | {"tokenizer.ggml.add_eos_token": value}))
    assert (found("hi").input_ids[-1] == found.eos_token_id) is is_on


def test_an_id_may_be_of_any_type_of_number_or_a_text(qwen, caplog):
    key = "tokenizer.ggml.eos_token_id"
    for value in (float(qwen[key]), str(qwen[key])):
        assert tokenizer_of(gguf_of(qwen | {key: value})).eos_token_id == qwen[key]
    assert caplog.records == []
    odd: list[Any] = [0.5, "none", [1], -2]
    for none in odd:
        assert tokenizer_of(gguf_of(qwen | {key: none})).eos_token_id is None
    assert caplog.text.count("ignored") >= 4


def test_a_flag_without_its_token_adds_none(qwen):
    del (metadata := qwen | {"tokenizer.ggml.add_bos_token": True})["tokenizer.ggml.bos_token_id"]
    plain = tokenizer_of(gguf_of(qwen))("hi").input_ids
    assert tokenizer_of(gguf_of(metadata))("hi").input_ids == plain


def test_a_template_and_the_text_after_it_have_one_bos(llama):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    found = tokenizer_of(gguf_of(llama | {"tokenizer.chat_template": template}))
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    assert found.apply_chat_template(talk, tokenize=False) == "<s>hi</s>yes</s>"
    ids = found.apply_chat_template(talk, return_dict=False)
    assert ids.count(1) == 1


# kinds of tokens


def test_tokens_of_control_are_skipped_when_decoding_and_those_added_are_not(qwen):
    found = tokenizer_of(gguf_of(qwen))
    ids = found("<|im_start|><think>x</think><|im_end|>").input_ids
    assert len(ids) == 5
    assert found.decode(ids, skip_special_tokens=True) == "<think>x</think>"


def test_a_padded_vocabulary_has_no_texts_beyond_the_original(qwen):
    tokens, kinds = qwen["tokenizer.ggml.tokens"], qwen["tokenizer.ggml.token_type"]
    count = len(tokens)
    padding = {
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{count + i}]" for i in range(9))],
        "tokenizer.ggml.token_type": [*kinds, *[UNUSED] * 9],
    }
    found = tokenizer_of(gguf_of(qwen | padding))
    assert len(found) == count
    assert found.decode([count + 3]) == ""


def test_a_padding_token_that_is_a_word_stays_in_the_text(qwen):
    token_id = qwen["tokenizer.ggml.tokens"].index("!")
    found = tokenizer_of(gguf_of(qwen | {"tokenizer.ggml.padding_token_id": token_id}))
    assert found.decode(found("a!").input_ids, skip_special_tokens=True) == "a!"


def test_a_file_without_kinds_keeps_its_ends_whole(qwen):
    del (metadata := dict(qwen))["tokenizer.ggml.token_type"]
    found = tokenizer_of(gguf_of(metadata))
    assert len(found("<|im_end|><|endoftext|>").input_ids) == 2


def test_an_empty_and_a_repeated_token_do_no_harm(qwen):
    tokens = [*qwen["tokenizer.ggml.tokens"], "", "!"]
    kinds = [*qwen["tokenizer.ggml.token_type"], NORMAL, NORMAL]
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    found, expected = tokenizer_of(gguf_of(qwen | changed)), tokenizer_of(gguf_of(qwen))
    assert [found(text).input_ids for text in TEXTS] == [expected(t).input_ids for t in TEXTS]


def test_scores_that_are_all_the_same_stand_for_the_order_of_the_ids(llama):
    """As those of a file that was made without a tokenizer.model."""
    scores = [-1000.0] * len(llama["tokenizer.ggml.scores"])
    found, expected = (
        tokenizer_of(gguf_of(llama | changed))
        for changed in ({"tokenizer.ggml.scores": scores}, {})
    )
    assert [found(text).input_ids for text in TEXTS] == [expected(t).input_ids for t in TEXTS]


def test_tokens_of_phi_3_take_the_spaces_after_them(llama):
    found = tokenizer_of(gguf_of(llama | {"general.name": "Phi 3.5 MoE", "general.type": "model"}))
    assert found("<|im_end|>\n hi").input_ids == found("<|im_end|>hi").input_ids
    assert found("<s>\nhi").input_ids != found("<s>hi").input_ids


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("tokens", [1, 2], "tokens is no list of str"),
        ("token_type", [1, 2], "token_type has 2 entries for"),
        ("token_type", ["a"], "token_type is no list of int"),
        ("merges", "a b", "merges is no list"),
        ("scores", [0.5], "scores"),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(key, value, said, qwen, llama):
    metadata = llama if key == "scores" else qwen
    with pytest.raises(CheckpointError, match=said):
        tokenizer_of(gguf_of(metadata | {f"tokenizer.ggml.{key}": value}))


def test_scores_may_be_whole_numbers_and_kinds_more_than_tokens(llama):
    scores = [int(score) for score in llama["tokenizer.ggml.scores"]]
    kinds = [*llama["tokenizer.ggml.token_type"], NORMAL]
    changed = {"tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": kinds}
    found, expected = tokenizer_of(gguf_of(llama | changed)), tokenizer_of(gguf_of(llama))
    assert found("hello you").input_ids == expected("hello you").input_ids


# chat templates


def test_named_chat_templates_are_kept_by_name(qwen):
    def templates(**named: str) -> Any:
        return tokenizer_of(gguf_of(qwen | {f"tokenizer.{k}": v for k, v in named.items()}))

    found = templates(chat_template="a", **{"chat_template.tool_use": "b"}).chat_template
    assert found == {"default": "a", "tool_use": "b"}
    assert templates(chat_template="a").chat_template == "a"
    assert templates(**{"chat_template.rag": "c"}).chat_template == {"rag": "c"}
    assert tokenizer_of(gguf_of(qwen)).chat_template is None
    for odd in (5, ["a"]):
        other = qwen | {"tokenizer.chat_template": odd}
        assert tokenizer_of(gguf_of(other)).chat_template is None


# ends of an answer


def ends_of(tokens: Mapping[str, int], **ids: int) -> list[str]:
    """The texts of the ends that a file with these tokens and kinds has."""
    keys = {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in ids.items()}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(tokens.values()),
    }
    return [list(tokens)[i] for i in gguf_of(metadata | keys).vocabulary.ends()]


def test_answers_end_with_the_ids_of_the_file_and_with_names_that_are_known():
    tokens = {"a": NORMAL, "<x>": CONTROL, "<|im_end|>": CONTROL, "<y>": CONTROL}
    assert ends_of(tokens, eos=3, eot=1) == ["<y>", "<x>", "<|im_end|>"]
    assert ends_of({"<|im_end|>": NORMAL, "<EOT>": USER_DEFINED}) == ["<|im_end|>", "<EOT>"]


def test_an_end_of_sequence_is_one_whatever_its_kind_unless_it_is_a_tag_of_html():
    for kind in (NORMAL, CONTROL, USER_DEFINED):
        assert ends_of({"a": NORMAL, "</s>": kind}) == ["</s>"]
        beside = {"<eos>": CONTROL, "</b>": USER_DEFINED, "</s>": kind}
        assert ends_of(beside) == ["<eos>", *(["</s>"] if kind == CONTROL else [])]
    assert ends_of({"</b>": NORMAL, "</s>": NORMAL}, eos=1) == ["</s>"]


def test_a_message_inside_an_answer_does_not_end_it():
    tokens = ["<|return|>", "<|call|>", "<|end|>"]
    assert ends_of(dict.fromkeys(tokens, CONTROL), eos=0) == ["<|return|>", "<|call|>"]
    assert ends_of(dict.fromkeys(tokens[1:], CONTROL), eos=0) == ["<|call|>", "<|end|>"]


def test_ids_that_are_no_token_are_left_out_with_a_warning(qwen, caplog):
    count = len(qwen["tokenizer.ggml.tokens"])
    for value, is_said in ((count, True), (-5, True), (2.5, True), ("x", True), (-1, False)):
        caplog.clear()
        metadata = qwen | {"tokenizer.ggml.padding_token_id": value}
        assert tokenizer_of(gguf_of(metadata)).pad_token is None
        assert ("padding_token_id" in caplog.text) is is_said


def test_bytes_of_a_file_are_its_tokens(llama):
    assert llama["tokenizer.ggml.token_type"].count(BYTE) == 256
    found = tokenizer_of(gguf_of(llama))
    ids = found("\x00", add_special_tokens=False).input_ids
    assert found.convert_ids_to_tokens(ids)[-1] == "<0x00>"
