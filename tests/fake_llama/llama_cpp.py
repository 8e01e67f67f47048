"""In the place of llama-cpp-python: what our runner calls of it, noting the batches. A file that is
called bad.gguf cannot be loaded; one that is called dying.gguf kills the process at its first text.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

__version__ = "0"
BATCHES: list[list[tuple[int, int, int, bool]]] = []  # (token, position, sequence, wants logits)

llama_model_default_params = SimpleNamespace
llama_context_default_params = SimpleNamespace


def _nothing(*_: object) -> None: ...


llama_log_callback = llama_log_set = llama_backend_init = llama_get_memory = _nothing
llama_memory_clear = llama_get_logits = llama_batch_free = llama_free = llama_model_free = _nothing


def llama_print_system_info() -> bytes:
    return b"CPU : AVX2 = 1 | "


def llama_model_load_from_file(file: bytes, _: object) -> str | None:
    if file.endswith(b"bad.gguf"):
        sys.stderr.write("no magic\n")
        return None
    return file.decode()


def llama_init_from_model(model: str, _: object) -> str:
    return model


def llama_batch_init(num_tokens: int, *_: int) -> SimpleNamespace:
    zeros: dict[str, Any] = {
        name: [0] * num_tokens for name in ("token", "pos", "n_seq_id", "logits")
    }
    return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(num_tokens)], **zeros)


def llama_decode(context: str, batch: SimpleNamespace) -> int:
    if context.endswith("dying.gguf"):
        os._exit(9)
    assert batch.n_tokens == len(batch.token)
    sequences = [sequence for (sequence,) in batch.seq_id]
    BATCHES.append(list(zip(batch.token, batch.pos, sequences, batch.logits, strict=True)))
    return 0
