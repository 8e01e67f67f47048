"""How long is the first token of a long conversation's next turn after a restart of the server?

    python benchmarks/prompt_restart.py [--tokens 10000]

A random model with as many bytes of keys and values for each token as a real one of 30 billion
parameters, 32 KiB, answers a long prompt. Its server is killed, the page cache forgets the store's
files, and a new server answers the next turn. Beside it: reading the same bytes, the turn in the
first server, and its tokens.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

DEMO_LONG = Path(__file__).resolve().parents[1] / "models" / "demo-long"
WAIT_S = 600.0


def make_checkpoint(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=6144,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=256,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=65536,
        eos_token_id=0,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_LONG / name, folder)


@contextmanager
def server(checkpoint: Path, store: Path) -> Iterator[str]:
    """Yield the URL of a server, which is killed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = ["--prompt-store", store, "--prefix-cache", "2GiB", "--max-body", str(1 << 24)]
    command = [sys.executable, "-m", "moe_infinity", "serve", checkpoint, *options, "--port", port]
    process = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + WAIT_S
        while True:
            assert time.monotonic() < end
            assert process.poll() is None
            try:
                if httpx.get(f"{url}/health/ready", timeout=60).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        ask(url, [5, 6, 7], 2)  # loads what a first request loads
        yield url
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def ask(url: str, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
    """Return the answer's token ids, and the seconds until all of them were there."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "logprobs": 1}
    began = time.perf_counter()
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S)
    seconds = time.perf_counter() - began
    answer.raise_for_status()
    text = answer.json()["choices"][0]["text"]
    ids = httpx.post(f"{url}/tokenize", json={"prompt": text}, timeout=60).json()["tokens"]
    return ids, seconds


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.block"))


def settle(folder: Path) -> None:
    """Wait until nothing more is written."""
    before = -1
    while (now := stored_bytes(folder)) != before:
        before = now
        time.sleep(1.0)


def forget(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*.block"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_all(folder: Path) -> float:
    forget(folder)
    began = time.perf_counter()
    for path in sorted(folder.rglob("*.block")):
        path.read_bytes()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        checkpoint, store = Path(folder) / "model", Path(folder) / "store"
        make_checkpoint(checkpoint)
        prompt = [(7 * at * at + at) % 6000 + 100 for at in range(arguments.tokens)]
        turn = [*prompt, *((11 * at) % 6000 + 100 for at in range(30))]
        with server(checkpoint, store) as url:
            _, computed_s = ask(url, prompt, 1)
            settle(store)
            kept = Path(folder) / "kept"
            shutil.copytree(store, kept)
            _, known_s = ask(url, turn, 1)
            expected, _ = ask(url, turn, 16)
        num_bytes = stored_bytes(kept)
        reading_s = [read_all(kept) for _ in range(3)]
        restarted_s = []
        for _ in range(3):
            with server(checkpoint, kept) as url:
                forget(kept)
                _, seconds = ask(url, turn, 1)
                restarted_s.append(seconds)
                found, _ = ask(url, turn, 16)
                assert found == expected, (found, expected)
                assert httpx.get(f"{url}/stats", timeout=60).json()["engine"]["prompt_store"][
                    "hits"
                ]
        print(f"{num_bytes / 1e6:.0f} MB of {arguments.tokens} tokens")
        print(f"the prompt computed: {computed_s:.2f} s; the next turn, known: {known_s:.2f} s")
        print("reading the files, s:", *(f"{each:.2f}" for each in sorted(reading_s)))
        print("the next turn after a restart, s:", *(f"{each:.2f}" for each in sorted(restarted_s)))


if __name__ == "__main__":
    main()
