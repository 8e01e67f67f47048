"""What does it cost to know which tokens a grammar allows?

    python benchmarks/grammar_masks.py

Mean microseconds of a mask, which includes setting the logits that it forbids, over answers of
random tokens: with the vocabulary of models/demo, and with one of 150,000 tokens, the rest of which
are words of the Python files around here. And milliseconds to prepare vocabulary and grammar.
"""

from __future__ import annotations

import json
import re
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from moe_infinity.server.grammars import GrammarCompiler, Structure, part_of
from moe_infinity.server.sampling import Constraint, Sampler

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
NUM_TOKENS = 150_000
NUM_ANSWERS = 5
MOST_TOKENS = 100  # of an answer
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "colour": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "number"}, "maxItems": 5},
    },
    "required": ["name", "colour", "sizes"],
    "additionalProperties": False,
}
STRUCTURES = {
    "json_object": Structure("json", {"type": "object"}, "json"),
    "schema": Structure("json", {"type": "array", "items": ITEM, "minItems": 3}, "json"),
    "regex": Structure("regex", r"([A-Z][a-z]{2,9} [0-9]{1,4}(, |\. )){10,20}", "regex"),
}


def wide_tokenizer(demo: Any) -> Any:
    """The demo's tokens, and words up to NUM_TOKENS in all. It only decodes."""
    vocab: dict[str, int] = demo.get_vocab()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words: dict[str, None] = {}  # in the order in which they are found
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = path.read_text("utf-8", errors="ignore")
        words |= dict.fromkeys(re.findall(r" ?\w{1,16}| ?[^\w\s]{1,6}", text))
        if len(words) >= NUM_TOKENS:
            break
    for word in words:
        ((token, _),) = letters.pre_tokenize_str(word)
        if len(vocab) < NUM_TOKENS:
            vocab.setdefault(token, len(vocab))
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = letters
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=demo.eos_token)


def measured(tokenizer: Any) -> dict[str, float]:
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    began = time.perf_counter()
    compiler.lark("vocabulary")
    figures = {"tokens": len(tokenizer), "prepare_ms": (time.perf_counter() - began) * 1e3}
    for name, structure in STRUCTURES.items():
        lark = compiler.lark(name)
        start = lark.part(part_of(structure, name))
        began = time.perf_counter()
        matcher = compiler.compiled(lark, start, name)
        figures[f"{name}_compile_ms"] = (time.perf_counter() - began) * 1e3
        num_masks = 0
        masking_s = 0.0
        for seed in range(NUM_ANSWERS):
            constraint = Constraint(matcher.deep_copy())
            sampler = Sampler([constraint], seed=seed, constraint=constraint)
            while not constraint.is_complete and constraint.num_masks < MOST_TOKENS:
                sampler.choose(torch.zeros(len(tokenizer)))
            num_masks += constraint.num_masks
            masking_s += constraint.masking_s
        figures[f"{name}_mask_us"] = masking_s / num_masks * 1e6
    return {name: round(value, 1) for name, value in figures.items()}


def main() -> None:
    demo = AutoTokenizer.from_pretrained(DEMO)
    results = [measured(demo), measured(wide_tokenizer(demo))]
    for name in results[0]:
        print(f"{name:24s}", *(f"{result[name]:12,.1f}" for result in results))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
