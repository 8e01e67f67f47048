"""Logits of llama.cpp, for gguf_nearness.py. Runs in an interpreter that has llama_cpp and numpy.

python benchmarks/llama_logits.py MODEL.gguf IDS.npy OUT.npy      # int [B, N] -> float32 [B, N, V]

With --float32 after them its cache has keys and values in float32 instead of float16.
"""

from __future__ import annotations

import sys

import llama_cpp
import numpy as np


def logits_of(model: str, ids_BN: np.ndarray, *, is_float32: bool = False) -> np.ndarray:
    """Each sequence as one prompt."""
    llama_cpp.llama_backend_init()
    loaded = llama_cpp.llama_model_load_from_file(
        model.encode(), llama_cpp.llama_model_default_params()
    )
    if not loaded:
        raise SystemExit(f"llama.cpp cannot load {model}")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = ids_BN.shape[1]
    if is_float32:
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
    context = llama_cpp.llama_init_from_model(loaded, params)
    found = []
    for ids_N in ids_BN.tolist():
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch = llama_cpp.llama_batch_init(len(ids_N), 0, 1)
        batch.n_tokens = len(ids_N)
        for at, token_id in enumerate(ids_N):
            batch.token[at], batch.pos[at], batch.logits[at] = token_id, at, True
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
        if status := llama_cpp.llama_decode(context, batch):
            raise SystemExit(f"llama_decode gives status {status}")
        rows = llama_cpp.llama_get_logits(context)
        found.append(np.ctypeslib.as_array(rows, (len(ids_N), vocab_size)).copy())
        llama_cpp.llama_batch_free(batch)
    return np.stack(found)


if __name__ == "__main__":
    is_float32 = sys.argv[4:] == ["--float32"]
    np.save(sys.argv[3], logits_of(sys.argv[1], np.load(sys.argv[2]), is_float32=is_float32))
