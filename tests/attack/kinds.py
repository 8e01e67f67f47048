"""Kinds of attacks: each is a function that sends something, as often as it is called.

`python -m tests.attack.kinds PORT KINDS SECONDS THREADS` attacks with these kinds, separated by
commas, or with all of them, and prints how often each was tried.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import resource
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.attack.driving import ATTACKERS, Target

Attack = Callable[[Target, random.Random, str], None]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/embeddings": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/api/chat": {"messages": [{"role": "user", "content": "a"}], "stream": False},
    "/api/generate": {"prompt": "a", "stream": False, "options": {"num_predict": 1}},
    "/api/embed": {"input": "a"},
    "/completion": {"prompt": "a", "n_predict": 1},
    "/apply-template": {"messages": [{"role": "user", "content": "a"}]},
}
FIELDS = (
    "prompt", "input", "messages", "tools", "functions", "stop", "stop_token_ids", "logit_bias",
    "logprobs", "n", "metadata", "chat_template_kwargs", "structured_outputs", "response_format",
    "tokens", "system", "options", "format", "stream_options", "model", "user", "seed", "unknown",
)  # fmt: skip
MOST = 4 << 20  # bytes of a body


def head(path: str, key: str, more: str) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n{more}\r\n\r\n"
    ).encode()


def repeated(item: str, num: int) -> str:
    return ",".join([item] * min(num, MOST // (len(item) + 2)))


def wrong_items(at: Target, chance: random.Random, key: str) -> None:
    """Lists and objects in which everything is wrong, in each field of each route."""
    path, least = chance.choice(list(ROUTES.items()))
    item = chance.choice(["{}", "[]", "1.5", '"a"', "null", "[[]]", '{"a":{}}', "true", "-1"])
    num = chance.choice([1_000, 20_000, 100_000, 1_400_000])
    value = chance.choice(
        [
            f"[{repeated(item, num)}]",
            f'[{{"role":"user","content":[{repeated(item, num)}]}}]',
            "{" + ",".join(f'"{each}":{item}' for each in range(min(num, 200_000))) + "}",
        ]
    )
    body = json.dumps(least)[:-1] + f', "{chance.choice(FIELDS)}": {value}}}'
    at.ask("POST", path, body.encode()[:MOST], key)


def odd_values(at: Target, chance: random.Random, key: str) -> None:
    """Deep, huge, not numbers, half texts."""
    path, least = chance.choice(list(ROUTES.items()))
    value = chance.choice(
        [
            "[" * 200_000, '{"a":' * 100_000, "1" * 100_000, "1e999999", "NaN", "-Infinity",
            '"\\ud800"', '"' + "\\u0000" * 100_000 + '"', '"' + "a" * 3_000_000 + '"', "9" * 400,
            '"' + '\\"' * 1_000_000 + '"', "[" + "{}," * 600_000 + '"' + '\\"' * 500_000,
        ]
    )  # fmt: skip
    body = json.dumps(least)[:-1] + f', "{chance.choice(FIELDS)}": {value}}}'
    at.ask("POST", path, body.encode()[:MOST], key)


def long_texts(at: Target, chance: random.Random, key: str) -> None:
    """Prompts of megabytes, of words, of one letter, of spaces, of what has no tokens."""
    word = chance.choice(
        ["The old house stood. ", "a", " ", "\n\t", "é漢👍🏽", "<|endoftext|>", "\x00"]
    )
    text = (word * (MOST // len(word.encode())))[: chance.choice([100_000, 1_000_000, MOST])]
    text = text.encode()[: MOST - 200].decode("utf-8", "ignore")
    path = chance.choice([path for path in ROUTES if path != "/detokenize"])
    least = dict(ROUTES[path])
    if "messages" in least:
        least["messages"] = [{"role": "user", "content": text}]
    else:
        least["prompt" if "prompt" in least else "input"] = text
    body = json.dumps(least, ensure_ascii=False).encode()[:MOST]
    at.ask("POST", path, body, key)


def full_conversations(at: Target, chance: random.Random, key: str) -> None:
    """As many messages, parts, calls and tools as the limits allow."""
    said = {"role": "user", "content": "a"}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    part = {"type": "text", "text": "a"}
    body: dict[str, Any] = chance.choice(
        [
            {"messages": [said] * 9_999},
            {"messages": [{"role": "user", "content": [part] * 9_999}]},
            {"messages": [{"role": "assistant", "tool_calls": [call] * 1_000}, said]},
            {"messages": [{"role": "system", "content": "a"}, said] * 4_000},
            {"messages": [said], "tools": [tool] * 1_000},
            {"messages": [said], "tools": [tool] * 1_000, "tool_choice": "required"},
            {"messages": [{"role": "user", "content": [part] * 100}] * 900},
        ]
    )
    path = chance.choice(["/v1/chat/completions", "/apply-template", "/v1/messages"])
    at.ask("POST", path, body | {"max_tokens": 1}, key)


def structures(at: Target, chance: random.Random, key: str) -> None:
    """Grammars, patterns, choices and schemas that are large or slow; half of the clients leave."""
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(60):
        nested = {"type": "object", "properties": {"a": nested, "b": nested}}
        if len(json.dumps(nested)) > 200_000:
            break
    wide = {f"p{each}": {"enum": [f"v{each}"] * 5} for each in range(5_000)}
    rules = "\n".join(f'r{each} ::= "a{each}" [a-z]* r{each + 1}?' for each in range(3_000))
    wanted: dict[str, Any] = chance.choice(
        [
            {"grammar": 'root ::= "a" ' + "#\n" * chance.choice([10_000, 60_000, 1_000_000])},
            {"grammar": f'root ::= r0\n{rules}\nr3000 ::= "a"'},
            {"grammar": "root ::= " + "(" * 5_000 + '"a"' + ")*" * 5_000},
            {"grammar": 'root ::= ("a" | "b" | root root)*'},
            {"regex": "(a*)*" * 2_000},
            {"regex": "(a|b)*a" + "(a|b)" * 3_000},
            {"regex": "a{1,30000}" * 20},
            {"regex": "(((a{1,100}){1,100}){1,100}){1,100}"},
            {
                "choice": [
                    f"choice {each}" for each in range(chance.choice([1_000, 1_900, 100_000]))
                ]
            },
            {"json": nested},
            {"json": {"type": "object", "properties": wide, "required": list(wide)}},
            {"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 10**6}},
            {"json": {"type": "string", "pattern": "(a|aa)*" * 500}},
        ]
    )
    body = {"prompt": "a", "max_tokens": 4, "structured_outputs": wanted}
    if chance.random() < 0.5:
        leave(at, "/v1/completions", body, key, chance.random())
    else:
        at.ask("POST", "/v1/completions", body, key)


def leave(at: Target, path: str, body: dict[str, Any], key: str, seconds: float) -> None:
    """Send a request and go."""
    data = json.dumps(body).encode()
    with at.connected(head(path, key, f"Content-Length: {len(data)}") + data):
        time.sleep(seconds)


def samplers(at: Target, chance: random.Random, key: str) -> None:
    """Settings that cost something for each token."""
    settings: dict[str, Any] = chance.choice(
        [
            {"logit_bias": {str(each): 0.001 for each in range(6_000)}},
            {"no_repeat_ngram_size": 3},
            {"stop": ["a" * 999 + str(each) for each in range(16)]},
            {"logprobs": 20},
            {"frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1},
            {"top_p": 0.9, "typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01},
            {"stop_token_ids": list(range(1_000)), "min_tokens": 300},
        ]
    )
    body = {"prompt": "The old " * 60, "n": 8, "max_tokens": 300, "seed": 1, **settings}
    at.ask("POST", "/v1/completions", body, key)


def greedy(at: Target, chance: random.Random, key: str) -> None:
    """Many choices and many prompts at once."""
    body = chance.choice(
        [
            {"prompt": "The", "n": 16, "max_tokens": 500},
            {"prompt": ["The old house " * 200] * 16, "max_tokens": 100},
            {"prompt": ["a"] * 64, "max_tokens": 100},
        ]
    )
    at.ask("POST", "/v1/completions", body, key)


def echoes(at: Target, chance: random.Random, key: str) -> None:
    """Prompts that come back with alternatives for each token."""
    body = {"prompt": "The old house " * 250, "echo": True, "logprobs": 20, "max_tokens": 1, "n": 6}
    at.ask("POST", "/v1/completions", body, key)


def ids(at: Target, chance: random.Random, key: str) -> None:
    """Token ids, many or impossible."""
    many = [chance.choice([1, 5_000, 2**40])] * chance.choice([1_000, 400_000])
    path, name = chance.choice(
        [("/detokenize", "tokens"), ("/v1/completions", "prompt"), ("/v1/embeddings", "input")]
    )
    at.ask("POST", path, {name: many, "max_tokens": 1}, key)


def cancels(at: Target, chance: random.Random, key: str) -> None:
    """Clients that leave at any moment."""
    body = {"prompt": "The old house " * 100, "max_tokens": 400, "stream": chance.random() < 0.5}
    leave(at, "/v1/completions", body, key, chance.random() / 2)


def unread(at: Target, chance: random.Random, key: str) -> None:
    """Streams that nobody reads."""
    body = {"prompt": "The", "max_tokens": 500, "stream": True, "logprobs": 20, "n": 8}
    data = json.dumps(body).encode()
    sent = head("/v1/completions", key, f"Content-Length: {len(data)}") + data
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1_024)
        client.settimeout(20)
        client.connect(("127.0.0.1", at.port))
        client.sendall(sent)
        time.sleep(5)


def slow_bodies(at: Target, chance: random.Random, key: str) -> None:
    """Bodies that hardly arrive."""
    sent = head("/v1/completions", key, f"Content-Length: {MOST}")
    with at.connected(sent) as client:
        for _ in range(50):
            client.sendall(b" " * chance.choice([1, 1_000]))
            time.sleep(0.1)


def idle(at: Target, chance: random.Random, key: str) -> None:
    """Connections that say nothing, or half a header."""
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            sent = chance.choice(
                [b"", b"GET /health HT", head("/v1/completions", key, "A: b")[:-2]]
            )
            with contextlib.suppress(OSError):
                stack.enter_context(at.connected(sent))
        time.sleep(2)


def crumbs(at: Target, chance: random.Random, key: str) -> None:
    """A body in chunks of a byte."""
    with at.connected(head("/v1/completions", key, "Transfer-Encoding: chunked")) as client:
        for _ in range(20):
            client.sendall(b"1\r\n \r\n" * 2_000)


def noise(at: Target, chance: random.Random, key: str) -> None:
    """What is no HTTP, or odd HTTP."""
    sent = chance.choice(
        [
            chance.randbytes(10_000), b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 10_000,
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 500,
            b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
            head("/v1/completions", key, "Content-Length: 5\r\nTransfer-Encoding: chunked"),
            head("/v1/completions", key, "Content-Length: -1"),
            head("/v1/completions", key, "Content-Encoding: gzip\r\nContent-Length: 5") + b"abcde",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 100,
        ]
    )  # fmt: skip
    with at.connected() as client:
        client.sendall(sent)
        client.settimeout(1)
        client.recv(1 << 16)


def doors(at: Target, chance: random.Random, key: str) -> None:
    """Wrong keys, other methods, paths without a route."""
    method = chance.choice(["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"])
    path = chance.choice([*ROUTES, "/metrics", "/stats", "/page/../../etc/passwd", "/a" * 4_000])
    at.ask(method, path, {} if method == "POST" else None, chance.choice(["", "wrong", key + "x"]))


def looks(at: Target, chance: random.Random, key: str) -> None:
    """What is asked about the server, all the time."""
    for _ in range(20):
        path = chance.choice(["/metrics", "/stats", "/openapi.json", "/", "/v1/models", "/props"])
        at.ask("GET", path, None, key)


KINDS: dict[str, Attack] = {
    each.__name__: each
    for each in (
        wrong_items, odd_values, long_texts, full_conversations, structures, samplers, greedy,
        echoes, ids, cancels, unread, slow_bodies, idle, crumbs, noise, doors, looks,
    )
}  # fmt: skip


def main(port: str, kinds: str, seconds: str, num: str) -> None:
    """Attack in threads, each with a key of its own."""
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (4_000, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    chosen = list(KINDS) if kinds == "all" else kinds.split(",")
    end = time.monotonic() + float(seconds)
    tried: Counter[str] = Counter()

    def attack(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            kind = chance.choice(chosen)
            with contextlib.suppress(OSError, http.client.HTTPException):
                KINDS[kind](Target(int(port)), chance, ATTACKERS[number])
            tried[kind] += 1

    threads = [threading.Thread(target=attack, args=(each,)) for each in range(int(num))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.write(json.dumps(tried) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
