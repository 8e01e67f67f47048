"""Runners of peers_cell.py for other systems than ours and llama.cpp, as their examples have it."""

from __future__ import annotations

import os
from typing import Any

PAST_THE_END = 1 << 20  # tokens that fastllm may write: the caller stops reading before


class IkLlama:
    """ik_llama.cpp by the package ik-llama-cpp-python, whose wheel has no AVX512: build its sdist.

    Private names of the package used here: `_internals`, `_context`, `_n_ubatch`. Its public
    `generate` chooses the tokens itself.
    """

    package = "ik_llama_cpp"

    def __init__(self, gguf: str, threads: int, context: int) -> None:
        import ik_llama_cpp
        from ik_llama_cpp import _ctypes_api, _internals

        self._api, self._batches = _ctypes_api, _internals
        self._about = f"ik-llama-cpp-python {ik_llama_cpp.__version__}, {threads} threads"
        self._model = ik_llama_cpp.IkLlama(gguf, n_ctx=context, n_threads=threads)

    def begin(self, num_sequences: int) -> None:
        self._model._context.kv_cache_clear()
        self._length = 0

    def feed(self, ids_BT: list[list[int]]) -> None:
        (ids,) = ids_BT
        step = self._model._context._n_ubatch
        for at in range(0, len(ids), step):
            batch = self._batches.make_batch_range(
                ids[at : at + step],
                pos_start=self._length + at,
                logits_last=at + step >= len(ids),
            )
            status = self._model._context.decode(batch)
            self._api.llama_batch_free(batch)
            if status:
                raise RuntimeError(f"llama_decode gives status {status}")
        self._length += len(ids)

    def num_activated(self) -> int | None:
        return None

    def about(self) -> str:
        return self._about

    def close(self) -> None:
        self._model.close()


class FastLlm:
    """fastllm with experts on the disk where there is a limit, and in memory otherwise. It gives
    tokens and takes none between, so it decodes its own: the tokens after the prompt are greedy.
    """

    package = "ftllm"

    def __init__(self, gguf: str, threads: int, expert_bytes: int | None) -> None:
        os.environ.setdefault("FASTLLM_DISK_DIRECT_IO", "1")
        from ftllm import llm

        llm.set_cpu_threads(threads)
        llm.set_device_map("cpu")
        if expert_bytes is not None:
            llm.set_device_map("disk", True)
            llm.set_moe_cpu_cache(expert_bytes)
        self._llm = llm
        self._model: Any = llm.model(gguf, dtype="bfloat16")

    def begin(self, num_sequences: int) -> None:
        self._pieces: Any = None

    def feed(self, ids_BT: list[list[int]]) -> None:
        if self._pieces is None:
            given = {"max_length": PAST_THE_END, "do_sample": False}
            self._pieces = iter(self._model.stream_response_raw(ids_BT[0], **given))
        next(self._pieces)

    def num_activated(self) -> int | None:
        return None

    def about(self) -> str:
        return "ftllm, greedy tokens of its own after the prompt"

    def close(self) -> None:
        if self._pieces is not None:
            self._pieces.close()


RUNNERS: dict[str, type[IkLlama] | type[FastLlm]] = {"ik_llama.cpp": IkLlama, "fastllm": FastLlm}
