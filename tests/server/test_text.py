"""Pieces of text: whole characters, no part of a stop string, together what decode() gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from moe_infinity.server.sequences import Detokenizer, StopStrings
from tests.server.conftest import DEMO

TOKENIZER = AutoTokenizer.from_pretrained(DEMO)
TEXTS = st.text(st.sampled_from("ab é–你🙂\u200d👍 \n"), max_size=30)


def decoded(ids: list[int]) -> str:
    text: str = TOKENIZER.decode(ids, skip_special_tokens=True)
    return text


@given(st.lists(st.integers(0, 6143), max_size=40))
def test_pieces_of_any_ids_add_up_to_what_decode_gives(ids):
    detokenizer = Detokenizer(TOKENIZER)
    assert "".join([*map(detokenizer.add, ids), detokenizer.finish()]) == decoded(ids)


@given(TEXTS)
def test_no_piece_of_a_text_ends_within_a_character(text):
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.add(token_id) for token_id in TOKENIZER(text)["input_ids"]]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 40), max_size=10),
)
def test_text_is_cut_at_the_first_stop_however_it_comes(text, stops, cuts):
    found = [text.index(stop) for stop in stops if stop in text]
    stopping = StopStrings(stops)
    shown = ""
    start = 0
    for end in [*sorted(cuts), len(text)]:
        shown += stopping.add(text[start:end])
        start = max(start, end)
        if stopping.stop is not None:
            break
    else:
        shown += stopping.finish()
    if not found:
        assert stopping.stop is None
        assert shown == text
    else:  # where a stop was complete first: another may begin before it but end after it
        assert stopping.stop in stops
        assert text[len(shown) :].startswith(stopping.stop)
        assert text.startswith(shown)
