"""llama.cpp, driven by llama-cpp-python, in a process of its own:

    python llama_process.py SETTINGS

reads one request a line from stdin and answers each with one line of JSON on stdout.

    {"ids": [5, 6, 9], "num_prompt": 2}  ->  {"prompt_s": 0.02, "decode_s": 0.01}

The first line it writes says what it is. Only the standard library is imported, so that any
interpreter that has llama_cpp can run this file.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

CONTEXT = 4096  # tokens that llama.cpp has room for, of all sequences together
LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
BATCH = 2048  # tokens of a call, llama.cpp's default as the next one
MICRO_BATCH = 512  # tokens of a pass


def say_errors(level: int, text: bytes, _: object) -> None:
    """What llama.cpp logs, but for what it does without fault."""
    if level == LOG_ERROR:
        sys.stderr.write(text.decode())


class LlamaCpp:
    """llama.cpp with its own defaults: the file mapped, flash attention where it helps."""

    def __init__(
        self, gguf: str, threads: int, *, repack: bool = True, context: int = CONTEXT
    ) -> None:
        """Raises SystemExit if it cannot load the file."""
        import llama_cpp

        self._api = llama_cpp
        self._threads = threads
        self._context_length = context
        self._log = llama_cpp.llama_log_callback(say_errors)  # kept as long as it may be called
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.use_extra_bufts = repack
        self._model = llama_cpp.llama_model_load_from_file(gguf.encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {gguf}")
        self._contexts: dict[int, Any] = {}  # by number of sequences
        self.begin(1)

    def begin(self, num_sequences: int) -> None:
        """Forget the texts so far. Raises SystemExit if there is no room for a context."""
        if num_sequences not in self._contexts:
            self._contexts[num_sequences] = self._new_context(num_sequences)
        self._context = self._contexts[num_sequences]
        self._length = 0
        memory = self._api.llama_get_memory(self._context)
        self._api.llama_memory_clear(memory, True)

    def _new_context(self, num_sequences: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx = self._context_length
        params.n_seq_max = num_sequences
        params.n_batch = BATCH
        params.n_ubatch = MICRO_BATCH
        params.n_threads = params.n_threads_batch = self._threads
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise SystemExit(f"llama.cpp cannot make a context of {self._context_length} tokens")
        return context

    def feed(self, ids_BT: list[list[int]]) -> None:
        """Compute the next tokens of each sequence, and the logits of its last one."""
        length = len(ids_BT[0])
        step = max(1, BATCH // len(ids_BT))  # tokens of a sequence in one call
        for at in range(0, length, step):
            self._decode([ids_T[at : at + step] for ids_T in ids_BT], is_last=at + step >= length)
        self._api.llama_get_logits(self._context)  # waits until they are there

    def _decode(self, ids_BT: list[list[int]], *, is_last: bool) -> None:
        batch = self._api.llama_batch_init(sum(map(len, ids_BT)), 0, 1)
        for sequence, ids_T in enumerate(ids_BT):
            for offset, token_id in enumerate(ids_T, start=1):
                at = batch.n_tokens
                batch.token[at] = token_id
                batch.pos[at] = self._length + offset - 1
                batch.n_seq_id[at] = 1
                batch.seq_id[at][0] = sequence
                batch.logits[at] = is_last and offset == len(ids_T)
                batch.n_tokens = at + 1
        status = self._api.llama_decode(self._context, batch)
        self._api.llama_batch_free(batch)
        if status:
            raise SystemExit(f"llama_decode gives status {status}")
        self._length += len(ids_BT[0])

    def about(self) -> str:
        """Versions, and what the arithmetic was built for."""
        built_for = self._api.llama_print_system_info().decode().strip(" |")
        return f"llama-cpp-python {self._api.__version__}, {self._threads} threads; {built_for}"

    def close(self) -> None:
        """Free all that it took."""
        for context in self._contexts.values():
            self._api.llama_free(context)
        self._api.llama_model_free(self._model)


def answer(llama: LlamaCpp, ids: list[int], num_prompt: int) -> dict[str, float]:
    """Seconds of a prompt, and of the tokens after it, fed one by one."""
    llama.begin(1)
    started = time.perf_counter()
    llama.feed([ids[:num_prompt]])
    after_prompt = time.perf_counter()
    for token_id in ids[num_prompt:]:
        llama.feed([[token_id]])
    return {"prompt_s": after_prompt - started, "decode_s": time.perf_counter() - after_prompt}


def main() -> None:
    """Until stdin ends."""
    llama = LlamaCpp(**json.loads(sys.argv[1]))
    _reply({"about": llama.about()})
    for line in sys.stdin:
        _reply(answer(llama, **json.loads(line)))
    llama.close()


def _reply(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
