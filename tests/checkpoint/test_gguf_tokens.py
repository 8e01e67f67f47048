"""Tokens of GGUF files that mean more than their text: where a text begins and ends, what is never
split, and what a chat template and the end of an answer are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from moe_infinity import CheckpointError
from moe_infinity.gguf.tokenizer import chat_template_of, tokenizer_of
from moe_infinity.gguf.vocabulary import Vocabulary
from tests.checkpoint.gguf_originals import (
    TEXTS,
    gguf_of,
)
from tools.vocabulary_to_gguf import (
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
)

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


def with_token(metadata: dict[str, Any], text: str, kind: int, name: str) -> dict[str, Any]:
    """The metadata with one token more, whose id a key names."""
    tokens = metadata["tokenizer.ggml.tokens"]
    return metadata | {
        "tokenizer.ggml.tokens": [*tokens, text],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], kind],
        f"tokenizer.ggml.{name}_token_id": len(tokens),
    }


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_begin_or_end_that_is_a_word_stays_in_the_text(name, qwen):
    """As 11, which llama.cpp takes where a file names none: in Qwen's vocabulary, a comma."""
    token_id = qwen["tokenizer.ggml.tokens"].index(",")
    found = tokenizer_of(gguf_of(qwen | {f"tokenizer.ggml.{name}_token_id": token_id}))
    ids = found("x, y").input_ids
    assert token_id in ids
    assert found.decode(ids, skip_special_tokens=True) == "x, y"
    assert token_id not in found.all_special_ids


def test_an_answer_does_not_end_with_a_word_if_there_is_another_end():
    kinds = [NORMAL, NORMAL, CONTROL]
    assert Vocabulary("gpt2", ["a", ",", "<|im_end|>"], kinds, {"eos": 1}).ends() == [2]
    assert Vocabulary("gpt2", ["a", ",", "<b>"], kinds, {"eos": 1}).ends() == [1]


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_merges_go_over_a_begin_or_end_that_is_a_word(name, qwen):
    tokens = qwen["tokenizer.ggml.tokens"]
    changed = with_token(qwen, ",!", NORMAL, name) | {
        "tokenizer.ggml.merges": [", !", *qwen["tokenizer.ggml.merges"]],
        f"tokenizer.ggml.{name}_token_id": tokens.index(","),
    }
    assert tokenizer_of(gguf_of(changed))(",!").input_ids == [len(tokens)]


@pytest.mark.parametrize("name", ["bos", "eos"])
@pytest.mark.parametrize("mark", ["<s>", "[BOS]", "_<EOT>"])
def test_a_mark_that_a_key_names_is_special_whatever_its_kind(mark, name, qwen):
    changed = with_token(qwen, mark, NORMAL, name)
    found = tokenizer_of(gguf_of(changed))
    token_id = changed[f"tokenizer.ggml.{name}_token_id"]
    ids = found(f"a{mark}b").input_ids
    assert ids[1] == token_id
    assert token_id in found.all_special_ids
    assert found.decode(ids, skip_special_tokens=True) == "ab"


@pytest.mark.parametrize("kinds", [False, True])
def test_without_kinds_whatever_a_key_names_is_special(kinds, qwen):
    """A list in which all are alike says no more than none."""
    del (metadata := dict(qwen))["tokenizer.ggml.token_type"]
    tokens = qwen["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.bos_token_id"] = tokens.index(",")
    if kinds:
        metadata["tokenizer.ggml.token_type"] = [NORMAL] * len(tokens)
    found = tokenizer_of(gguf_of(metadata))
    assert found.bos_token == ","
    assert found.decode(found("x, y").input_ids, skip_special_tokens=True) == "x y"


def test_a_begin_that_no_template_of_the_library_can_name_is_refused(qwen):
    """It has spaces, at which transformers takes such a template apart."""
    changed = with_token(qwen, "<|begin of text|>", CONTROL, "bos")
    with pytest.raises(CheckpointError, match="no tokenizer can be made"):
        tokenizer_of(gguf_of(changed | {"tokenizer.ggml.add_bos_token": True}))


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


def templates(**named: Any) -> Any:
    """The templates of a file that has these, "default" being that without a name."""
    key = "tokenizer.chat_template"
    return chat_template_of({f"{key}.{k}".removesuffix(".default"): v for k, v in named.items()})


def test_named_chat_templates_are_kept_by_name():
    assert templates(default="a", tool_use="b") == {"default": "a", "tool_use": "b"}
    assert templates(default="a") == "a"
    assert templates(rag="c", short="d") == {"rag": "c", "short": "d"}
    assert chat_template_of({"tokenizer.chat_templates": ["rag"]}) is None
    for odd in (5, ["a"]):
        assert templates(default=odd) is None


def test_without_a_default_template_that_for_tools_or_the_only_one_is_it(qwen):
    assert templates(tool_use="b", rag="c") == {"tool_use": "b", "rag": "c", "default": "b"}
    assert templates(tool_use="b") == "b"
    assert templates(rag="c") == "c"
    found = tokenizer_of(gguf_of(qwen | {"tokenizer.chat_template.rag": "c"}))
    assert found.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "c"


def test_a_blank_chat_template_is_none():
    for blank in ("", " \n"):
        assert templates(default=blank) is None
        assert templates(default=blank, rag="c") == "c"
        assert templates(default="a", tool_use=blank) == "a"


@pytest.mark.parametrize("key", ["chat_template", "chat_template.tool_use"])
def test_a_template_that_is_called_chatml_is_chatml(key, qwen):
    found = tokenizer_of(gguf_of(qwen | {f"tokenizer.{key}": "chatml"}))
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " yes\n"}]
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n yes\n<|im_end|>\n"
    assert found.apply_chat_template(talk, tokenize=False) == text
    begun = found.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert begun == f"{text}<|im_start|>assistant\n"


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


def test_a_word_of_a_byte_level_vocabulary_ends_nothing():
    """As in Qwen's, whose rules never make one of that text."""
    assert ends_of({"<|im_end|>": CONTROL, "</s>": NORMAL}) == ["<|im_end|>"]
    assert ends_of({"<|im_end|>": CONTROL, "</s>": NORMAL}, eos=1) == ["</s>", "<|im_end|>"]
    assert ends_of({"<|im_end|>": CONTROL, "</s>": USER_DEFINED}) == ["<|im_end|>", "</s>"]


def test_a_message_inside_an_answer_does_not_end_it():
    tokens = ["<|return|>", "<|call|>", "<|end|>"]
    assert ends_of(dict.fromkeys(tokens, CONTROL), eos=0) == ["<|return|>", "<|call|>"]
    assert ends_of(dict.fromkeys(tokens[1:], CONTROL), eos=0) == ["<|call|>", "<|end|>"]


@pytest.mark.parametrize("beside", [("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>")])
@pytest.mark.parametrize("key", ["eot", "eom", "eos"])
def test_no_key_makes_a_message_inside_an_answer_its_end(key, beside):
    tokens = dict.fromkeys([*beside, "<|end|>"], CONTROL)
    assert ends_of(tokens, **{key: 2}) == [*beside]
    del tokens[beside[1]]
    assert ends_of(tokens, **{key: 1}) == ["<|end|>", beside[0]]


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
