"""One process of peers.py: load a model, feed it texts, print what that took as JSON.

Texts are token ids, so nobody samples: a prompt is fed at once, the tokens after it one by one.
Only the standard library is imported before the runner is known. So the interpreter that has
llama_cpp needs no torch.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

CONTEXT = 4096  # tokens that llama.cpp has room for, of all sequences together
LOG_ERROR = 4  # GGML_LOG_LEVEL_ERROR
BATCH = 2048  # tokens of a call of llama.cpp, its default as the next one
MICRO_BATCH = 512  # tokens of a pass


class Prompt(NamedTuple):
    num_sequences: int  # of different text, in one forward pass
    num_tokens: int  # of each sequence, fed at once
    num_decoded: int  # steps after it, one token of each sequence


class Runner(Protocol):
    """A loaded model; `package` is imported before the time of loading begins."""

    package: str

    def begin(self, num_sequences: int) -> None:
        """Forget the texts so far."""

    def feed(self, ids_BT: list[list[int]]) -> None:
        """Compute the next tokens of each sequence, and the logits of its last one."""

    def num_activated(self) -> int | None:
        """Experts activated so far, added up over layers and steps; None if nobody counts them."""

    def about(self) -> str:
        """Versions, and what the arithmetic was built for."""

    def close(self) -> None:
        """End what it began."""


class Ours:
    package = "moe_infinity.model"

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from moe_infinity import MoE

        self._moe = MoE(model, **options)
        gc.freeze()  # as commands do

    def begin(self, num_sequences: int) -> None:
        from transformers import DynamicCache

        from moe_infinity.architectures.attention_inputs import cache_parameter

        cache = DynamicCache(config=self._moe.model.config)
        self._cached = {cache_parameter(self._moe.model.forward): cache}

    def feed(self, ids_BT: list[list[int]]) -> None:
        import torch

        with torch.no_grad():
            self._moe.model(
                torch.tensor(ids_BT),
                **self._cached,
                use_cache=True,
                logits_to_keep=1,
            )

    def report(self) -> Any:
        return self._moe.report()

    def num_activated(self) -> int | None:
        report = self.report()
        return report.prefill.lookups + report.decode.lookups

    def about(self) -> str:
        import torch
        import transformers

        built_for = torch.backends.cpu.get_cpu_capability()
        return (
            f"experts {self._moe.report().experts}; torch {torch.__version__} "
            f"({built_for}, {torch.get_num_threads()} threads), "
            f"transformers {transformers.__version__}, Python {platform.python_version()}"
        )

    def close(self) -> None:
        self._moe.close()


def say_errors(level: int, text: bytes, _: object) -> None:
    """What llama.cpp logs, but for what it does without fault."""
    if level == LOG_ERROR:
        sys.stderr.write(text.decode())


class Theirs:
    """llama.cpp with its own defaults: the file mapped, flash attention where it helps."""

    package = "llama_cpp"

    def __init__(
        self,
        gguf: str,
        threads: int,
        *,
        repack: bool = True,
        context: int = CONTEXT,
        micro_batch: int = MICRO_BATCH,
    ) -> None:
        """Raises SystemExit if it cannot load the file."""
        import llama_cpp

        self._api = llama_cpp
        self._threads = threads
        self._context_length = context
        self._micro_batch = micro_batch
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
        params.n_batch = max(BATCH, self._micro_batch)
        params.n_ubatch = self._micro_batch
        params.n_threads = params.n_threads_batch = self._threads
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise SystemExit(f"llama.cpp cannot make a context of {self._context_length} tokens")
        return context

    def feed(self, ids_BT: list[list[int]]) -> None:
        """Compute the next tokens of each sequence, and the logits of its last one."""
        length = len(ids_BT[0])
        most = max(BATCH, self._micro_batch)
        step = max(1, most // len(ids_BT))  # tokens of a sequence in one call
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

    def num_activated(self) -> int | None:
        return None

    def close(self) -> None:
        """Free all that it took."""
        for context in self._contexts.values():
            self._api.llama_free(context)
        self._api.llama_model_free(self._model)


RUNNERS: dict[str, type[Ours] | type[Theirs]] = {"ours": Ours, "llama.cpp": Theirs}


def bytes_from_disk() -> int:
    """What this process has read from the disk, page faults included."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def run_prompt(runner: Runner, prompt: Prompt, ids: Iterator[int]) -> dict[str, Any]:
    """The time of a prompt, and of the steps after it."""
    length = prompt.num_tokens + prompt.num_decoded
    text_BT = [list(islice(ids, length)) for _ in range(prompt.num_sequences)]
    runner.begin(prompt.num_sequences)
    counts = [(bytes_from_disk(), runner.num_activated())]
    times = [time.perf_counter()]
    at = 0
    for num_tokens, num_steps in ((prompt.num_tokens, 1), (1, prompt.num_decoded)):
        for _ in range(num_steps):
            runner.feed([ids_T[at : at + num_tokens] for ids_T in text_BT])
            at += num_tokens
        times.append(time.perf_counter())
        counts.append((bytes_from_disk(), runner.num_activated()))
    result: dict[str, Any] = {"s": times[1] - times[0], **difference(counts[0], counts[1], 1)}
    if prompt.num_decoded:
        result["decode"] = {
            "tok_per_s": prompt.num_sequences * prompt.num_decoded / (times[2] - times[1]),
            **difference(counts[1], counts[2], prompt.num_decoded),
        }
    return result


Counts = tuple[int, "int | None"]


def difference(before: Counts, after: Counts, num_steps: int) -> dict[str, Any]:
    """Bytes read from the disk and experts activated, for each step."""
    found: dict[str, Any] = {"read_bytes": (after[0] - before[0]) / num_steps}
    if before[1] is not None and after[1] is not None:
        found["activated"] = (after[1] - before[1]) / num_steps
    return found


def run_cell(
    runner: str, options: dict[str, Any], prompts: list[list[int]], ids: list[int]
) -> dict[str, Any]:
    """Loading, then each prompt with text of its own. What one leaves in memory serves the next."""
    kind: Any = RUNNERS.get(runner) or importlib.import_module("peers_others").RUNNERS[runner]
    importlib.import_module(kind.package)
    started = time.perf_counter()
    loaded: Runner = kind(**options)
    load_s = time.perf_counter() - started
    rest = iter(ids)
    found = [run_prompt(loaded, Prompt(*prompt), rest) for prompt in prompts]
    result = {"load_s": load_s, "prompts": found, "about": loaded.about()}
    loaded.close()
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="One process of peers.py", fromfile_prefix_chars="@"
    )
    parser.add_argument("--cell", type=json.loads, required=True)
    try:
        outcome = run_cell(**parser.parse_args().cell)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        outcome = {"failed": f"{type(error).__name__}: {error}"[:200]}
    print(f"\n{json.dumps(outcome)}", flush=True)
    os._exit(0)  # fastllm's library crashes when it is unloaded
