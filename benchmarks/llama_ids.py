"""Token ids of llama.cpp, for gguf_tokenizers.py. Runs in an interpreter that has llama_cpp.

python benchmarks/llama_ids.py VOCABULARY.gguf TEXTS.json OUT.json   # a list of lists of ids
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import llama_cpp


def ids_of(model: str, texts: list[str]) -> list[list[int]]:
    """Special tokens in a text count as such; none are added."""
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    loaded = llama_cpp.llama_model_load_from_file(model.encode(), params)
    if not loaded:
        raise SystemExit(f"llama.cpp cannot load {model}")
    vocab = llama_cpp.llama_model_get_vocab(loaded)
    found = []
    for text in texts:
        raw = text.encode()
        room = len(raw) + 8
        ids = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(vocab, raw, len(raw), ids, room, False, True)
        found.append(list(ids[:count]))
    return found


if __name__ == "__main__":
    texts = json.loads(Path(sys.argv[2]).read_text("utf-8"))
    Path(sys.argv[3]).write_text(json.dumps(ids_of(sys.argv[1], texts)))
