"""A small tokenizer of each kind that decodes in a way of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_python import PreTrainedTokenizer

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
WORDS = [
    "<unk>",
    "<s>",
    "</s>",
    "<tool>",
    "a",
    "b",
    "c d",
    " ",
    "  ",
    "\n",
    ".",
    ",",
    "!",
    "?",
    "'",
]
WORDS += [
    "n",
    "n't",
    "s",
    "ve",
    "re",
    "'s",
    "é",
    "e",
    "\u0301",
    "你",
    "🙂",
    "\u200d",
    "👩",
    "�",
    "",
]
MARKED = [*WORDS, "▁", "▁▁▁", "▁a", "▁b", "▁.", "▁n't", "▁'", "▁return", "a▁"]
BYTES = [f"<0x{value:02X}>" for value in range(256)]
WORDPIECE = [*WORDS, "##a", "##ing", "##é", "do", "##'", "[PAD]", "|"]
SUFFIXED = [*WORDS, "a</w>", "b</w>", ".</w>", "</w>", "n't</w>"]


def byte_letters() -> dict[int, str]:
    """The letter for each byte in vocabularies of bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [value for value in range(256) if value not in kept]
    return {value: chr(value) for value in kept} | {
        value: chr(256 + at) for at, value in enumerate(rest)
    }


LETTERS = byte_letters()


def as_letters(piece: bytes) -> str:
    return "".join(LETTERS[value] for value in piece)


PIECES = [" a", "\n    ", "你", "🙂", "👩\u200d👩", "e\u0301", " .", " n't", "don", "'t"]
BYTE_LEVEL = [*WORDS[:4], *(as_letters(bytes([value])) for value in range(256))]
BYTE_LEVEL += [as_letters(piece.encode()) for piece in PIECES]
BYTE_LEVEL += [
    as_letters(b) for b in (b"\xf0\x9f", b"\x99\x82a", b" \xe2\x82", b"\xac\xe2", b"\x80\x80")
]


def ids_of(tokens: list[str]) -> dict[str, int]:
    return {token: token_id for token_id, token in enumerate(dict.fromkeys(tokens))}


def fast(model: Any, decoder: Any, **settings: Any) -> Any:
    tokenizer = Tokenizer(model)
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **settings)


def bpe(tokens: list[str], decoder: Any, **settings: Any) -> Any:
    return fast(models.BPE(ids_of(tokens), [], unk_token="<unk>"), decoder, **settings)


def unigram(decoder: Any, **settings: Any) -> Any:
    scored = [(token, 0.0) for token in ids_of(MARKED)]
    return fast(models.Unigram(scored, unk_id=0), decoder, **settings)


def wordpiece(decoder: Any, **settings: Any) -> Any:
    model = models.WordPiece(ids_of(WORDPIECE), unk_token="<unk>")
    return fast(model, decoder, **settings)


class Spelled(PreTrainedTokenizer):  # type: ignore[misc]
    """A tokenizer in Python, which strips its text."""

    vocabulary = WORDPIECE

    def __init__(self, **settings: Any) -> None:
        self._ids = ids_of(self.vocabulary)
        super().__init__(unk_token="<unk>", bos_token="<s>", eos_token="</s>", **settings)

    @property
    def vocab_size(self) -> int:
        return len(self._ids)

    def get_vocab(self) -> dict[str, int]:
        return dict(self._ids)

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids[token]

    def _convert_id_to_token(self, index: int) -> str:
        return list(self._ids)[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return " ".join(tokens).replace(" ##", "").strip()


class Parted(Spelled):
    """A tokenizer of bytes whose text has parts between special tokens, as Mistral's own has."""

    def _decode(self, token_ids: Any, skip_special_tokens: bool = False, **settings: Any) -> str:
        parts = [""]
        run = b""
        for token in self.convert_ids_to_tokens(token_ids):
            if token in BYTES:
                run += bytes([int(token[1:-1], 16)])
                continue
            is_shown = token == "a" or not skip_special_tokens
            parts += [run.decode(errors="replace"), token if is_shown else ""]
            run = b""
        return "".join([*parts, run.decode(errors="replace")])

    vocabulary = ["<unk>", "<s>", "</s>", "a", *BYTES]


def llama(left: int = 1) -> Any:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", left, 0)])


GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
CLEANS = {"clean_up_tokenization_spaces": True}
KINDS: dict[str, Callable[[], Any]] = {
    "byte-level BPE": lambda: bpe(BYTE_LEVEL, decoders.ByteLevel()),
    "byte-level BPE that is cleaned": lambda: bpe(
        BYTE_LEVEL,
        decoders.ByteLevel(),
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True,
        **CLEANS,
    ),
    "SentencePiece BPE with bytes, Llama": lambda: bpe([*MARKED, *BYTES], llama()),
    "SentencePiece BPE with bytes, Gemma": lambda: bpe([*MARKED, *BYTES], GEMMA),
    "stripped by three spaces": lambda: bpe([*MARKED, *BYTES], llama(3)),
    "Metaspace, always": lambda: unigram(decoders.Metaspace()),
    "Metaspace, first": lambda: unigram(decoders.Metaspace(prepend_scheme="first")),
    "Metaspace, never": lambda: unigram(decoders.Metaspace(prepend_scheme="never")),
    "Unigram that is cleaned": lambda: unigram(decoders.Metaspace(), **CLEANS),
    "WordPiece": lambda: wordpiece(decoders.WordPiece()),
    "WordPiece that is cleaned": lambda: wordpiece(decoders.WordPiece(cleanup=False), **CLEANS),
    "BPE with suffixes": lambda: bpe(SUFFIXED, decoders.BPEDecoder()),
    "CTC": lambda: wordpiece(decoders.CTC(pad_token="[PAD]", word_delimiter_token="|")),
    "no decoder": lambda: bpe(WORDS, None),
    "in Python": Spelled,
    "bytes in Python, parted by special tokens": Parted,
    "in Python that is cleaned": lambda: Spelled(**CLEANS),
    "the demo's": lambda: AutoTokenizer.from_pretrained(DEMO),
}  # fmt: skip
