r"""How text is split into words before a byte-level BPE merges the bytes of each word.

A GGUF file names the way in `tokenizer.ggml.pre`. The names, and which of them mean the same, are
those of llama.cpp (src/llama-vocab.cpp). The patterns are those of the tokenizer.json files that a
name stands for; where llama.cpp only approximates one, its source quotes the original.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACE = r"\s+(?!\S)|\s+"
LINES = rf"\s*[\r\n]+|{SPACE}"
GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{SPACE}"
DIGIT = r"\p{N}"
UP_TO_3_DIGITS = r"\p{N}{1,3}"
# Groups of three, counted from the right. Only the first looks ahead to the end of the number: if
# each did, time would grow by the square of its length.
THOUSANDS = r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})+(?!\p{N}))|\p{N}{1,3}"
# The same of numbers that end with a word; digits before a letter are cut from the left.
THOUSANDS_OF_WORDS = r"(?<!\d)\d++\b", r"(?<!\d)\d{1,2}(?=(?:\d{3})+\b)"


def _words(digits: str, *, start: str = f"{CONTRACTION}|", letter: str = r"\p{L}") -> str:
    """Words with one sign or space before them, numbers, and signs with what ends the line."""
    sign = rf"[^\s{letter.strip('[]')}\p{{N}}]"
    return rf"{start}[^\r\n\p{{L}}\p{{N}}]?{letter}+|{digits}| ?{sign}+[\r\n]*|{LINES}"


def _cased(
    digits: str, *, end: str = f"{CONTRACTION}?", but: str = "", ends: str = r"\r\n/"
) -> str:
    """Return what `_words` does, but a capital after a small letter begins a word."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{upper}*{lower}+{end}|{start}{upper}+{lower}*{end}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[{ends}]*|{LINES}"
    )


ASCII_SIGN = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
SIGNED_WORDS = (
    rf"{ASCII_SIGN}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
)
HAN_AND_KANA = "[一-龥぀-ゟ゠-ヿ]+"
HAN_AND_MORE = "[一-龥ࠀ-一가-퟿]+"
CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎ"
    "ↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)  # of Unicode 11, some left out
SENTENCE = r" ?[^(\s|.,!?…。，、।۔،)]+"
LINE_OR_ENDS = r"[^\n]+|[\n]+"
ASIAN = "[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"


@dataclass(frozen=True, slots=True)
class Splitting:
    """A way of splitting that `tokenizer.ggml.pre` names."""

    patterns: tuple[str, ...]  # each splits what those before it left, at both ends of a match
    is_nfc: bool = False  # text is composed first
    ignores_merges: bool = False  # a word that is a token is not split
    adds_bos: bool = False  # where `tokenizer.ggml.add_bos_token` is absent
    is_byte_level: bool = True  # False: BPE of characters, in which spaces are written as "▁"


_GPT2 = Splitting((GPT2,))
_SINGLE_DIGITS = Splitting((DIGIT, GPT2))
_QWEN2 = Splitting((_words(DIGIT),))
_LLAMA3 = Splitting((_words(UP_TO_3_DIGITS),))
_LLAMA_BPE = replace(_LLAMA3, ignores_merges=True, adds_bos=True)
_DEEPSEEK3 = Splitting((UP_TO_3_DIGITS, HAN_AND_KANA, rf"{SIGNED_WORDS}[\r\n]*|{LINES}"))
_GPT4O = Splitting((_cased(UP_TO_3_DIGITS),))
_BLOOM = Splitting((SENTENCE,))
_CHARACTERS = Splitting((), is_byte_level=False, adds_bos=True)

_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_BY_NAMES = {
    "default": Splitting(_DEFAULT),
    "gpt-2 phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe gigachat"
    " a.x-4.0 mellum exaone4 jais trillion granite-docling": _GPT2,
    "mpt olmo modern-bert": replace(_GPT2, is_nfc=True),
    "starcoder refact smollm codeshell exaone minerva-7b mellum2": _SINGLE_DIGITS,
    "command-r": replace(_SINGLE_DIGITS, is_nfc=True),
    "qwen2 f2llmv2": replace(_QWEN2, is_nfc=True),
    "deepseek-r1-qwen kormo megrez stablelm2 solar-open grok-2": _QWEN2,
    "hunyuan": replace(_QWEN2, is_nfc=True, ignores_merges=True),  # as tiktoken does
    "qwen35": Splitting((_words(DIGIT, letter=r"[\p{L}\p{M}]"),), is_nfc=True),
    "ufakzeka": Splitting((_words(DIGIT, start=""),)),
    "laguna": Splitting((LINE_OR_ENDS, _words(DIGIT))),
    "seed-coder": Splitting((
        rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{LINES}",
    )),
    "bailingmoe bailingmoe2 llada-moe": Splitting((
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        rf"|\s*[\r\n]|{SPACE}",
    )),
    "exaone-moe": Splitting((
        rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{SPACE}",
    )),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _LLAMA_BPE,
    "dbrx smaug-bpe chatglm-bpe": _LLAMA3,
    "glm4 glm5": replace(_LLAMA3, ignores_merges=True),
    "minicpm5": Splitting((UP_TO_3_DIGITS, _words(r"\p{N}+")), ignores_merges=True),
    "jais-2": Splitting((
        _words(UP_TO_3_DIGITS).removesuffix(SPACE)
        + "".join(rf"\s{{{2**power}}}(?!\S)|" for power in range(9, 1, -1))
        + r"\s{1,2}(?!\S)|\s{1}",
    )),
    "gpt-4o llama4 kanana2 talkie": replace(_GPT4O, ignores_merges=True),
    "minimax-m2": _GPT4O,
    "granite-embed-multi-97m": replace(_GPT4O, ignores_merges=True),
    "tiny_aya cohere2moe": Splitting((*THOUSANDS_OF_WORDS, *_GPT4O.patterns)),
    "tekken": Splitting((_cased(DIGIT, end=""),), ignores_merges=True, adds_bos=True),
    "kimi-k2": Splitting(
        (r"[\p{Han}]+|" + _cased(UP_TO_3_DIGITS, but=r"&&[^\p{Han}]", ends=r"\r\n"),),
        ignores_merges=True,
    ),
    "youtu": Splitting(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            _cased(DIGIT),
        ),
        ignores_merges=True,
    ),
    "deepseek-llm": Splitting((
        r"[\r\n]", rf"\s?[{CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
        HAN_AND_MORE, r"\p{N}+",
    )),
    "deepseek-coder": Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN_AND_MORE, DIGIT)),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _DEEPSEEK3,
    "spark2_5": Splitting((
        UP_TO_3_DIGITS, HAN_AND_KANA, rf"{SIGNED_WORDS}|[\r\n]|{SPACE}", DIGIT,
    )),
    "afmoe": Splitting((THOUSANDS, ASIAN, rf"{SIGNED_WORDS}[\r\n]*|{LINES}")),
    "superbpe": Splitting((r"\p{N}+", THOUSANDS)),
    "falcon": Splitting((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "poro-chat bloom gpt3-finnish": _BLOOM,
    "viking": Splitting((SENTENCE, DIGIT)),
    "chameleon": Splitting(
        (
            "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]", GPT2,
        ),
        adds_bos=True,
    ),
    "gemma4 granite-embed-multi-311m": _CHARACTERS,
    "sarvam-moe": replace(_CHARACTERS, adds_bos=False),
}  # fmt: skip
SPLITTINGS = {name: splitting for names, splitting in _BY_NAMES.items() for name in names.split()}
# What is certain where a file is older than the key, by general.architecture.
WITHOUT_NAME = {"qwen2moe": "qwen2", "qwen3moe": "qwen2", "dbrx": "dbrx", "olmoe": "olmo"}
