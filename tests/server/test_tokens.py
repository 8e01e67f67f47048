"""Texts become token ids within the context, and settings of sampling cost what a token costs."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoTokenizer, NoRepeatNGramLogitsProcessor

from moe_infinity.server import tokens
from moe_infinity.server.refusals import PromptTooLong
from moe_infinity.server.sampling import NoRepeatedNgrams, Penalties, Sampling
from moe_infinity.server.tokens import TextTokens


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained("models/demo")


def test_texts_have_the_ids_that_the_tokenizer_gives(tokenizer):
    found = TextTokens(tokenizer, 1024)
    texts = ("", "a", "The old house.\n\n  stood", "é漢👍🏽", "<|endoftext|> and <s>", "x" * 300)
    for text in texts:
        for has_special in (True, False):
            expected = tokenizer(text, add_special_tokens=has_special)["input_ids"]
            assert found.ids(text, "prompt", has_special=has_special) == expected


def test_a_text_far_beyond_the_context_is_refused_by_its_beginning(tokenizer, monkeypatch):
    found = TextTokens(tokenizer, 1024)
    seen: list[int] = []
    ids = found._ids

    def watched(text: str, *, has_special: bool) -> list[int]:
        seen.append(len(text))
        return ids(text, has_special=has_special)

    monkeypatch.setattr(found, "_ids", watched)
    with pytest.raises(PromptTooLong, match="or more"):
        found.ids("The old house stood by the river. " * 100_000, "prompt")
    assert sum(seen) < 100_000


def test_a_text_of_many_short_tokens_is_refused_by_its_beginning(tokenizer, monkeypatch):
    """Where the longest tokens could hold it."""
    found = TextTokens(tokenizer, 1024)
    text = "a b c d " * 2500
    found.require_possible(len(text), "prompt")
    seen: list[int] = []
    ids = found._ids

    def watched(text: str, *, has_special: bool) -> list[int]:
        seen.append(len(text))
        return ids(text, has_special=has_special)

    monkeypatch.setattr(found, "_ids", watched)
    with pytest.raises(PromptTooLong, match="or more"):
        found.ids(text, "prompt")
    assert seen == [1024 * tokens.CHARACTERS]


def test_a_text_that_no_tokens_can_hold_is_not_tokenized(tokenizer, monkeypatch):
    found = TextTokens(tokenizer, 100)
    monkeypatch.setattr(found, "_ids", None)
    for word in ("The old house stood by the river. ", "a", "é漢👍🏽"):
        with pytest.raises(PromptTooLong, match="or more"):
            found.ids(word * 100_000, "prompt")


def test_a_text_of_long_tokens_is_tokenized_whole(tokenizer):
    """Many characters need not be many tokens."""
    word = max(tokenizer.get_vocab(), key=lambda each: len(each) * each.isascii())
    text = f" {word.strip('Ġ▁')}" * 300
    expected = tokenizer(text)["input_ids"]
    assert len(text) > tokens.CHARACTERS * len(expected)
    assert TextTokens(tokenizer, len(expected)).ids(text, "prompt") == expected


def test_other_tokenizers_take_one_text_at_a_time():
    class Slow:
        num_running = 0

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            self.num_running += 1
            assert self.num_running == 1
            time.sleep(0.001)
            self.num_running -= 1
            return {"input_ids": [len(text)]}

    found = TextTokens(Slow(), 1024)
    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(lambda num: found.ids("a" * num, "prompt"), range(1, 50)))
    assert ids == [[num] for num in range(1, 50)]


def test_a_tokenizer_that_never_ends_is_refused(monkeypatch):
    monkeypatch.setattr(tokens, "TRIAL_S", 0.2)
    release = threading.Event()

    class Endless:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            release.wait(30)
            return {"input_ids": []}

    with pytest.raises(Exception, match="tokenizer takes more than"):
        TextTokens(Endless(), 1024)
    release.set()


# settings of sampling


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ngrams_are_forbidden_as_transformers_does(size):
    ids = torch.randint(0, 4, (1, 60), generator=torch.Generator().manual_seed(size))
    theirs = NoRepeatNGramLogitsProcessor(size)
    for start in (1, 2, 20):
        ours = NoRepeatedNgrams(size)
        for end in range(start, 60):
            scores = torch.zeros((1, 4))
            expected = theirs(ids[:, :end], scores.clone())
            assert torch.equal(ours(ids[:, :end], scores.clone()), expected), (start, end)


def test_biases_are_added_to_their_tokens():
    penalties = Penalties(Sampling(logit_bias={3: 1.5, 0: -100.0}), num_prompt=0)
    scores = penalties(torch.zeros((1, 0), dtype=torch.long), torch.zeros((1, 5)))
    assert scores.tolist() == [[-100.0, 0.0, 0.0, 1.5, 0.0]]
