"""A text that comes in pieces is the text of all its tokens, whatever the kind of tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.tokenization_python import PreTrainedTokenizer

from moe_infinity.detokenizer import Cleaned, Detokenizer
from tests.small_tokenizers import DEMO, KINDS, LETTERS, as_letters


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Iterator[Any]:
    return KINDS[request.param]()


def pieces_of(tokenizer: Any, ids: list[int], **settings: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **settings)
    return [*map(detokenizer.add, ids), detokenizer.held]


def check_all_beginnings(tokenizer: Any, ids: list[int], *, has_special: bool) -> None:
    """After each token: what was given, and what is held, is the text so far."""
    detokenizer = Detokenizer(tokenizer, has_special=has_special)
    given = ""
    for num, token_id in enumerate(ids, start=1):
        given += detokenizer.add(token_id)
        whole = tokenizer.decode(ids[:num], skip_special_tokens=not has_special)
        assert given + detokenizer.held == whole


@settings(max_examples=30)
@given(st.data(), st.booleans())
def test_after_each_token_the_pieces_are_the_text_so_far(tokenizer, data, has_special):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=24))
    check_all_beginnings(tokenizer, ids, has_special=has_special)


@settings(max_examples=30)
@given(st.data(), st.booleans())
def test_neighbours_in_the_vocabulary_are_common(tokenizer, data, has_special):
    """Few different tokens meet more often: repeated ones, runs of spaces or of bytes."""
    some = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=3))
    ids = data.draw(st.lists(st.sampled_from(some), max_size=40))
    check_all_beginnings(tokenizer, ids, has_special=has_special)


@given(st.text(st.sampled_from("ab é–你🙂\u200d👍e\u0301 \n."), max_size=30))
@example("👩\u200d👩\u200d👧 a\u0301\n    return 1")
def test_no_piece_of_a_text_ends_within_a_character(text):
    demo = DEMO_TOKENIZER
    pieces = pieces_of(demo, demo(text)["input_ids"])
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


DEMO_TOKENIZER = AutoTokenizer.from_pretrained(DEMO)


def test_a_text_does_not_wait_for_its_end():
    """A word waits for nothing, or for the next word where spaces are removed later."""
    for kind, most_held in (
        ("SentencePiece BPE with bytes, Llama", 1),
        ("WordPiece that is cleaned", 3),
    ):
        tokenizer = KINDS[kind]()
        detokenizer = Detokenizer(tokenizer)
        for token in ["a", "b", "c d", "a", "b"] * 10:
            detokenizer.add(tokenizer.convert_tokens_to_ids(token))
            assert len(detokenizer.held) <= most_held, kind


@given(st.text(st.sampled_from("a . n't's!,?'vre"), max_size=60), st.lists(st.integers(1, 5)))
def test_spaces_are_removed_as_from_the_whole(text, sizes):
    clean = PreTrainedTokenizer.clean_up_tokenization
    cleaned = Cleaned(lambda piece: clean(None, piece))
    shown = ""
    start = 0
    for size in [*sizes, len(text)]:
        shown += cleaned.add(text[start : start + size])
        start += size
        assert shown + cleaned.rest(text[start:]) == clean(None, text)


@pytest.mark.parametrize("has_special", [False, True])
def test_a_special_token_may_be_within_a_character(tokenizer, has_special):
    vocab = tokenizer.get_vocab()
    bytes_ = [vocab.get(f"<0x{value:02X}>", vocab.get(LETTERS[value])) for value in "🙂".encode()]
    a, special = vocab.get("a"), vocab.get("<s>", vocab.get("<|pad|>"))
    ids = [a, bytes_[0], bytes_[1], special, *bytes_[2:], a] * 2
    if None not in ids:
        check_all_beginnings(tokenizer, ids, has_special=has_special)


def test_hidden_tokens_leave_no_text_and_no_trace():
    tokenizer = KINDS["byte-level BPE"]()
    first, hidden, second = tokenizer.convert_tokens_to_ids(
        [as_letters(b"\xf0\x9f"), "<s>", as_letters(b"\x99\x82a")]
    )
    pieces = pieces_of(tokenizer, [first, hidden, second], has_special=True, hidden_ids={hidden})
    assert "".join(pieces) == "🙂a"


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
def test_work_grows_with_the_number_of_tokens(kind):
    """Also where no text comes for long, or none that is certain."""
    tokenizer = KINDS[kind]()
    stray = as_letters(b"\x80"), as_letters(b" \xe2\x82")
    vocab = tokenizer.get_vocab()
    decode = tokenizer.decode
    for token in vocab.keys() & {"a", " ", "<s>", "▁", "<0x80>", *stray}:
        lengths: list[int] = []

        def counting(ids: list[int], seen: list[int] = lengths, **settings: Any) -> str:
            seen.append(len(ids))
            return decode(ids, **settings)

        tokenizer.decode = counting
        pieces_of(tokenizer, [vocab[token]] * 1000)
        assert sum(lengths) < 1000 * 200, token
