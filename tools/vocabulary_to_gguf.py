"""The metadata that llama.cpp's converter writes of a tokenizer.json.

The scores of a SentencePiece model are not in that file. They are made of its merges, so that they
have their order.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "▁"
SCORE_OF_ADDED = -1000.0


def metadata_of(
    content: dict[str, Any], config: dict[str, Any], *, pre: str, vocab_size: int = 0
) -> dict[str, Any]:
    """The keys `tokenizer.*` by name. `content` is tokenizer.json, `config` tokenizer_config.json;
    `pre` names the way of splitting, "" if it is a SentencePiece model. Ids up to `vocab_size` get
    a token, too.
    """
    vocab = dict(content["model"]["vocab"])
    added = {token["id"]: token for token in content["added_tokens"]}
    texts = {token_id: text for text, token_id in vocab.items()}
    texts |= {token_id: token["content"] for token_id, token in added.items()}
    num_tokens = max(vocab_size, max(texts) + 1)
    kinds = [_kind(i, texts, added, is_pieces=not pre) for i in range(num_tokens)]
    tokens = [texts.get(token_id, f"[PAD{token_id}]") for token_id in range(num_tokens)]
    for token_id, kind in enumerate(kinds):
        if kind == USER_DEFINED:
            tokens[token_id] = tokens[token_id].replace(SPACE, " ")
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2" if pre else "llama",
        "tokenizer.ggml.pre": pre or "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
    }
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in content["model"]["merges"]]
    if pre:
        found["tokenizer.ggml.merges"] = [f"{left} {right}" for left, right in merges]
    else:
        ranks: dict[str, int] = {}
        for left, right in merges:
            ranks.setdefault(left + right, len(ranks))
        scores = [-float(ranks.get(text, len(ranks))) for text in tokens]
        found["tokenizer.ggml.scores"] = [
            SCORE_OF_ADDED * len(ranks) if token_id in added else score
            for token_id, score in enumerate(scores)
        ]
        found["tokenizer.ggml.add_space_prefix"] = '"Prepend"' in json.dumps(content["normalizer"])
    return found | _special(content, config, {t["content"]: i for i, t in added.items()})


def _kind(token_id: int, texts: dict[int, str], added: dict[int, Any], *, is_pieces: bool) -> int:
    text = texts.get(token_id)
    if text is None:
        return UNUSED
    if token_id in added:
        is_control = added[token_id]["special"] or re.fullmatch(r"<\|.*\|>|<｜.*｜>", text, re.S)
        is_control = is_control or text.startswith("<unused") or text in ("<pad>", "<mask>")
        return CONTROL if is_control else USER_DEFINED
    return BYTE if is_pieces and re.fullmatch("<0x[0-9A-F]{2}>", text) else NORMAL


def _special(
    content: dict[str, Any], config: dict[str, Any], ids: dict[str, int]
) -> dict[str, Any]:
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
    found: dict[str, Any] = {}
    for name, key in keys.items():
        token = config.get(f"{name}_token")
        text = token["content"] if isinstance(token, dict) else token
        if text in ids:
            found[f"tokenizer.ggml.{key}_token_id"] = ids[text]
    added = json.dumps(content.get("post_processor")).count("SpecialToken")
    found["tokenizer.ggml.add_bos_token"] = bool(added) or bool(config.get("add_bos_token"))
    found["tokenizer.ggml.add_eos_token"] = bool(config.get("add_eos_token"))
    template = config.get("chat_template")
    if isinstance(template, list):
        for entry in template:
            end = "" if entry["name"] == "default" else f".{entry['name']}"
            found[f"tokenizer.chat_template{end}"] = entry["template"]
        others = [entry["name"] for entry in template if entry["name"] != "default"]
        found["tokenizer.chat_templates"] = others
    elif template:
        found["tokenizer.chat_template"] = template
    return found


def read_tokenizer(folder: Path, *, pre: str, vocab_size: int = 0) -> dict[str, Any]:
    """`metadata_of` the tokenizer in a folder."""
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    template = folder / "chat_template.jinja"
    if template.is_file():
        config["chat_template"] = template.read_text("utf-8")
    return metadata_of(content, config, pre=pre, vocab_size=vocab_size)
