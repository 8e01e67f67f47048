"""The tokenizer of a GGUF file, made of its metadata with the `tokenizers` library.

    tokenizer.ggml.model   what it is                          here
    gpt2                   byte-level BPE                      words by splitting.py
    llama                  SentencePiece BPE, which has scores merges made of the scores
    gemma4                 BPE of characters, which has merges
    t5                     SentencePiece unigram               scores are log probabilities

Tokens that are never split are matched in the text before anything else: those for control, which
decoding can skip, and those that the model's makers added.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import repeat
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from moe_infinity.errors import CheckpointError, MoEInfinityError, UnsupportedModelError
from moe_infinity.gguf.file import WITH_CONFIG, GgufModel
from moe_infinity.gguf.splitting import SPLITTINGS, WITHOUT_NAME, Splitting
from moe_infinity.gguf.vocabulary import PREFIX, TokenKind, Vocabulary, flag_of, logger
from moe_infinity.untrusted.tokenizer_limits import MAX_VALUES, check_tokenizer_json

SPACE = "▁"  # how SentencePiece writes it
WHOLE = (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN)  # never split
NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # attributes of transformers' tokenizers
TEMPLATE = "tokenizer.chat_template"
ORIGINAL = "tokenizer.huggingface.json"
KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # what follows other tokens of Phi-3 loses spaces
CHATML = (  # that llama.cpp knows by name
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIED = "Ab 12\n"  # a text that every tokenizer has to take
MOST_CHARACTERS = 512  # of a token that others make; SentencePiece's default is 16
MOST_PAIRS = 32  # that make one token, on average; of Gemma's, two
Merges = list[tuple[str, str]]
Made = tuple[Tokenizer, bool, bool]  # it, whether it adds BOS and EOS if the file does not say


def tokenizer_of(gguf: GgufModel) -> Any:
    """transformers' tokenizer with the vocabulary, special tokens and chat templates of a file.
    Raises UnsupportedModelError for a way of splitting text that is not known, CheckpointError for
    a file without a vocabulary, or with one that contradicts itself.
    """
    vocabulary = gguf.vocabulary
    if not vocabulary.tokens:
        raise CheckpointError(f"{gguf.files[0]}: has no vocabulary\n{WITH_CONFIG}")
    original = _original_of(gguf)
    if original is None and vocabulary.model not in MAKERS:
        known = ", ".join(MAKERS)
        raise UnsupportedModelError(
            f"{gguf.files[0]}: {PREFIX}model is {vocabulary.model!r}, expected one of {known}"
            f"\n{WITH_CONFIG}"
        )
    try:
        made = _made(gguf, original)
        with suppress(Exception):  # of a text that it has no tokens for
            made.encode(TRIED)  # some panics come only here
        return made
    except (MoEInfinityError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of the library, whose panics are no `Exception`
        raise CheckpointError(
            f"{gguf.files[0]}: no tokenizer can be made of its vocabulary: {error}"
        ) from error


def _made(gguf: GgufModel, original: Made | None) -> Any:
    vocabulary = gguf.vocabulary
    tokenizer, adds_bos, adds_eos = original or MAKERS[vocabulary.model](gguf)
    if original is None:
        control, user_defined = _whole_tokens(gguf)
        tokenizer.add_special_tokens(control)
        tokenizer.add_tokens(user_defined)
    vars(tokenizer)["__deepcopy__"] = lambda memo: tokenizer  # transformers copies it for seconds
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        add_bos_token=adds_bos
        and vocabulary.model == "gemma4"
        or flag_of(gguf.metadata.get(f"{PREFIX}add_bos_token"), adds_bos),
        add_eos_token=flag_of(gguf.metadata.get(f"{PREFIX}add_eos_token"), adds_eos),
        chat_template=chat_template_of(gguf.metadata),
        **_named_tokens(vocabulary),
    )
    del vars(tokenizer)["__deepcopy__"]
    return made


def _original_of(gguf: GgufModel) -> Made | None:
    """The tokenizer.json that the file was made from, if the file has it. One with other tokens
    than the vocabulary is left out with a warning.
    """
    content = gguf.metadata.get(ORIGINAL)
    tokens = dict(enumerate(gguf.vocabulary.tokens))
    if content is None:
        return None
    try:
        if content.count(",") > MAX_VALUES:
            raise ValueError(f"it has more than {MAX_VALUES} values")
        check_tokenizer_json(ORIGINAL, json.loads(content))
        found = Tokenizer.from_str(content)
        found.no_padding()
        found.no_truncation()
        for text, token_id in found.get_vocab().items():
            if tokens.get(token_id) not in (text, text.replace(SPACE, " ")):
                raise ValueError(f"its token {token_id} is not that of the vocabulary")
        added = found.encode("a").ids
        plain = found.encode("a", add_special_tokens=False).ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of the library, whose panics are no `Exception`
        logger.warning("%s: %s is ignored: %s", gguf.files[0], ORIGINAL, error)
        return None
    return found, added[:1] != plain[:1], added[-1:] != plain[-1:]


def chat_template_of(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template of a file, or all by name where it has several. One without a default has
    that for tools as such, or its only one.
    """
    found = {
        key.removeprefix(TEMPLATE).removeprefix(".") or "default": CHATML
        if value == "chatml"
        else value
        for key, value in metadata.items()
        if f"{key}.".startswith(f"{TEMPLATE}.") and isinstance(value, str) and value.strip()
    }
    if len(found) == 1:
        return next(iter(found.values()))
    if "tool_use" in found:
        found.setdefault("default", found["tool_use"])
    return found or None


def _named_tokens(vocabulary: Vocabulary) -> dict[str, str]:
    """Arguments of transformers' tokenizers. What they name, decoding skips: no text, therefore."""
    return {
        f"{name}_token": vocabulary.tokens[token_id]
        for name, token_id in vocabulary.ids.items()
        if name in NAMED
        and not vocabulary.is_word(token_id)
        and (name in ("bos", "eos") or vocabulary.kinds[token_id] in WHOLE)
    }


def _whole_tokens(gguf: GgufModel) -> tuple[list[AddedToken], list[AddedToken]]:
    """Tokens that are never split: those for control, and the others."""
    vocabulary = gguf.vocabulary
    ids = {*vocabulary.ends(), *(vocabulary.ids.get(name) for name in ("bos", "eos"))}
    named = {id_ for id_ in ids if id_ is not None and not vocabulary.is_word(id_)}
    name = str(gguf.metadata.get("general.name", "")).lower()
    eats_space = gguf.architecture == "phimoe" or re.search("phi[- ]?3", name) is not None
    control: list[AddedToken] = []
    user_defined: list[AddedToken] = []
    for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if kind not in WHOLE and token_id not in named:
            continue
        rstrip = eats_space and text not in KEEP_SPACE
        token = AddedToken(text, rstrip=rstrip, normalized=False)
        is_read = kind == TokenKind.USER_DEFINED and token_id not in named
        (user_defined if is_read else control).append(token)
    return control, user_defined


# one maker for each tokenizer.ggml.model: the tokenizer, and whether it begins and ends a text with
# a token where the file does not say


def _byte_level(gguf: GgufModel) -> Made:
    splitting = _splitting_of(gguf)
    if not splitting.is_byte_level:
        return _characters(gguf)
    vocab = _vocab(gguf.vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocab, _stored_merges(gguf, vocab), ignore_merges=splitting.ignores_merges)
    )
    if splitting.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in splitting.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.adds_bos, False


def _characters(gguf: GgufModel) -> Made:
    vocab = _vocab(gguf.vocabulary)
    return _sentencepiece(gguf, vocab, _stored_merges(gguf, vocab), has_prefix=False)


def _scored(gguf: GgufModel) -> Made:
    vocab = _vocab(gguf.vocabulary)
    has_prefix = flag_of(gguf.metadata.get(f"{PREFIX}add_space_prefix"), True)
    return _sentencepiece(gguf, vocab, _merges_of_scores(gguf, vocab), has_prefix=has_prefix)


def _sentencepiece(
    gguf: GgufModel, vocab: dict[str, int], merges: Merges, *, has_prefix: bool
) -> Made:
    """Spaces are a character of their own, characters without a token are bytes."""
    unknown = gguf.vocabulary.ids.get("unk")
    tokenizer = Tokenizer(
        models.BPE(
            vocab,
            merges,
            unk_token=None if unknown is None else gguf.vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.insert(0, normalizers.Prepend(SPACE))
        back.append(decoders.Strip(" ", left=1, right=0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer, True, False


def _unigram(gguf: GgufModel) -> Made:
    vocabulary = gguf.vocabulary
    scores = _scores(gguf)
    model = models.Unigram(
        list(zip(vocabulary.tokens, scores, strict=True)), vocabulary.ids.get("unk"), False
    )
    tokenizer = Tokenizer(model)
    charsmap = gguf.metadata.get(f"{PREFIX}precompiled_charsmap")
    steps: list[Any] = []
    if charsmap:
        steps.append(normalizers.Precompiled(bytes(byte & 0xFF for byte in charsmap)))
    if flag_of(gguf.metadata.get(f"{PREFIX}remove_extra_whitespaces"), False):
        once = normalizers.Replace(Regex(" {2,}"), " ")
        steps += [normalizers.Strip(left=False, right=True), once]
    tokenizer.normalizer = normalizers.Sequence(steps)
    has_prefix = flag_of(gguf.metadata.get(f"{PREFIX}add_space_prefix"), True)
    scheme = "always" if has_prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme)
    tokenizer.decoder = decoders.Metaspace(SPACE, scheme)
    return tokenizer, False, True


MAKERS = {"gpt2": _byte_level, "llama": _scored, "gemma4": _characters, "t5": _unigram}


# their parts


def _splitting_of(gguf: GgufModel) -> Splitting:
    name = gguf.metadata.get(f"{PREFIX}pre") or WITHOUT_NAME.get(gguf.architecture)
    if name is None:
        logger.warning(
            "%s: does not say how text is split into words (%spre is absent), so text may become "
            "other tokens than those the model knows; name its tokenizer with --config",
            gguf.files[0],
            PREFIX,
        )
        name = "default"
    if name not in SPLITTINGS:
        raise UnsupportedModelError(
            f"{gguf.files[0]}: {PREFIX}pre is {name!r:.60}, a way of splitting text that is "
            f"not known\n{WITH_CONFIG}"
        )
    return SPLITTINGS[name]


def _vocab(vocabulary: Vocabulary) -> dict[str, int]:
    """Ids by text, without ids that only fill the embedding up. The first of equal texts counts."""
    found: dict[str, int] = {}
    for token_id, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        if kind != TokenKind.UNUSED or text != f"[PAD{token_id}]":
            found.setdefault(text, token_id)
    return found


def _stored_merges(gguf: GgufModel, vocab: dict[str, int]) -> Merges:
    """The pairs of `tokenizer.ggml.merges` of which all tokens are there."""
    merges = gguf.metadata.get(f"{PREFIX}merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise CheckpointError(f"{gguf.files[0]}: {PREFIX}merges is no list of texts")
    pairs = [(left, right) for left, _, right in map(str.partition, merges, repeat(" "))]
    return [(a, b) for a, b in pairs if a in vocab and b in vocab and a + b in vocab]


def _merges_of_scores(gguf: GgufModel, vocab: dict[str, int]) -> Merges:
    """All pairs of tokens that make a token, that of the highest score first."""
    scores = _scores(gguf)
    kinds = gguf.vocabulary.kinds
    made = [text for text, token_id in vocab.items() if kinds[token_id] == TokenKind.NORMAL]
    made.sort(key=lambda text: -scores[vocab[text]])
    own = {text: text for text in vocab}  # so that parts are no texts of their own
    found: Merges = []
    for text in made:
        if len(text) > MOST_CHARACTERS or len(found) > MOST_PAIRS * len(vocab):
            raise CheckpointError(
                f"{gguf.files[0]}: tokens of more than {MOST_CHARACTERS} characters, or that more "
                f"than {MOST_PAIRS} pairs of others make, are not those of SentencePiece"
            )
        for end in range(len(text) - 1, 0, -1):
            left = own.get(text[:end])
            right = own.get(text[end:])
            if left is not None and right is not None:
                found.append((left, right))
    return found


def _scores(gguf: GgufModel) -> list[float]:
    """Scores of all tokens; those of a file without any fall with the id."""
    num_tokens = len(gguf.vocabulary.tokens)
    scores = gguf.metadata.get(f"{PREFIX}scores") or [-float(i) for i in range(num_tokens)]
    if not isinstance(scores, list) or len(scores) < num_tokens:
        raise CheckpointError(
            f"{gguf.files[0]}: {PREFIX}scores are not those of {num_tokens} tokens"
        )
    return scores[:num_tokens]
