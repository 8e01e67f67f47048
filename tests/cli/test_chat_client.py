"""`chat --url` and servers that answer as ours does not."""

from __future__ import annotations

import gzip
import io
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from moe_infinity.cli import chat_client, terminal
from moe_infinity.server.pauses import LIFE_PERIOD_S
from moe_infinity.system.machine import interrupt_main

DELTA = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n'


class Scripted:
    """A server that says one thing, and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []


@contextmanager
def scripted(
    answer: bytes,
    *,
    status: int = 200,
    headers: Sequence[tuple[str, str]] = (),
    is_silent: bool = False,
    is_endless: bool = False,
    on_asked: Callable[[], object] = lambda: None,
) -> Iterator[Scripted]:
    script = Scripted()
    may_end = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            script.keys.append(self.headers["authorization"])
            script.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            on_asked()
            if is_silent:
                may_end.wait(20)
                return
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            with suppress(ConnectionError):  # the client leaves
                self.wfile.write(answer)
                while is_endless:
                    self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        script.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield script
        finally:
            may_end.set()
            server.shutdown()
            thread.join(20)


def chat(command: Callable[..., Any], url: str, *options: object) -> Any:
    return command("chat", "--url", url, *options, stdin="hello\n")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'data: {"error": "busy"}\n\n', "busy"),
        (b'data: {"error": {"message": "busy"}}\n\n', "busy"),
        (b'data: {"error": {"code": 7}}\n\n', '{"code": 7}'),
        (b"data: oops\n\n", "not a chunk of an answer: oops"),
        (b"data: 5\n\n", "not a chunk of an answer: 5"),
        (b'data: {"choices": [{}]}\n\n', "not a chunk of an answer"),
        (b'data: {"choices": [{"delta": null}]}\n\n', "not a chunk of an answer"),
        (b'data: {"choices": [{"delta": {"content": 5}}]}\n\n', "not a chunk of an answer"),
        (b'data: {"id": "x"}\n\n', "not a chunk of an answer"),
        (b"<html></html>", "no stream of events"),
        (b"", "no stream of events"),
    ],
)
def test_a_malformed_answer_is_an_error_with_the_servers_address(command, answer, said):
    with scripted(answer) as server:
        outcome = chat(command, server.url)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said(f"{server.url}: ")
    assert outcome.said(said)


def test_an_error_in_midstream_comes_after_the_text_before_it(command):
    with scripted(DELTA + b'data: {"error": {"message": "too late"}}\n\n') as server:
        outcome = chat(command, server.url)
    assert (outcome.code, outcome.out) == (1, "hi")
    assert outcome.said("too late")


def test_events_of_other_servers_are_read(command):
    """No space after the colon, an error that is null, usage without choices, comments."""
    events = b': ping\n\ndata:{"error": null, "choices": [{"delta": {"content": "ho"}}]}\n\n'
    events += b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n'
    with scripted(DELTA + events) as server:
        outcome = chat(command, server.url)
    assert (outcome.code, outcome.out) == (0, "hiho\n")


def test_a_server_that_says_nothing_is_not_waited_for_forever(command, monkeypatch):
    assert chat_client.READ_TIMEOUT_S > 2 * LIFE_PERIOD_S  # our own server's
    monkeypatch.setattr(chat_client, "READ_TIMEOUT_S", 0.2)
    with scripted(b"", is_silent=True) as server:
        outcome = chat(command, server.url)
    assert outcome.code == 1
    assert outcome.said(f"{server.url}: no answer: timed out")


def test_a_server_is_asked_for_the_top_p_that_was_given(command):
    with scripted(DELTA) as server:
        for top_p in (0.25, 1):
            options = ("--temperature", 1, "--top-p", top_p)
            assert chat(command, server.url, *options).code == 0
    assert [body["top_p"] for body in server.asked] == [0.25, 1]


def test_a_server_chooses_what_was_not_given(command):
    with scripted(DELTA) as server:
        for options in ((), ("--top-p", 0.5), ("--temperature", 0)):
            assert chat(command, server.url, *options).code == 0
    asked = [{"temperature", "top_p", "seed"} & body.keys() for body in server.asked]
    assert asked == [set(), {"top_p"}, {"temperature"}]


def test_the_first_of_several_keys_is_that_of_this_user(command):
    """`serve` takes several in the same variable."""
    with scripted(DELTA) as server:
        assert chat(command, server.url, "--api-key", "first second").code == 0
    assert [key for key in server.keys if key] == ["Bearer first"]


@pytest.mark.parametrize("top_p", ["0", "-0.1", "1.1", "nan"])
def test_top_p_is_above_0_for_a_model_and_for_a_server(command, top_p):
    for where in (["models/demo"], ["--url", "http://127.0.0.1:1"]):
        outcome = command("chat", *where, "--temperature", 1, "--top-p", top_p, stdin="hello\n")
        assert outcome.code == 2
        assert outcome.said("--top-p")


def test_a_key_may_have_any_letters(command):
    with scripted(DELTA) as server:
        assert chat(command, server.url, "--api-key", "sésame").code == 0
    assert [key.encode("latin-1").decode() for key in server.keys if key] == ["Bearer sésame"]


# hostile servers

HOSTILE = "\x1b[2J\x1b]0;owned\x07\x9b31m\r\x08\u202egnp.exe\u2066\u200b\u2028\ud83d\x00"


def event(**delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


def is_harmless(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


def test_an_answer_is_printed_without_what_a_terminal_would_obey(command):
    with scripted(event(content=f"a{HOSTILE}b\n\tc")) as server:
        outcome = chat(command, server.url)
    assert outcome.code == 0
    assert is_harmless(outcome.out.replace("\t", ""))
    assert outcome.out.startswith(r"a\x1b[2J\x1b]0;owned\x07\x9b31m\r\x08\u202egnp.exe")
    assert outcome.out.endswith("b\n\tc\n")


def test_joiners_of_emoji_and_scripts_are_printed(command):
    text = "\U0001f468\u200d\U0001f469 \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \u4e2d"
    with scripted(event(content=text)) as server:
        assert chat(command, server.url).out == text + "\n"


@pytest.mark.parametrize(
    "answer",
    [
        b'data: {"error": ' + json.dumps(HOSTILE).encode() + b"}\n\n",
        b'data: {"error": {"message": ' + json.dumps(HOSTILE).encode() + b"}}\n\n",
        b"data: " + HOSTILE.encode(errors="replace").replace(b"\r", b"") + b"\n\n",
        b"data: \xff\xfe\x1b[2J\xc0\n\n",
    ],
    ids=["error", "message", "no JSON", "no UTF-8"],
)
@pytest.mark.parametrize("status", [200, 418])
def test_a_message_is_printed_without_what_a_terminal_would_obey(command, answer, status):
    body = answer if status == 200 else answer.removeprefix(b"data: ")
    with scripted(body, status=status) as server:
        outcome = chat(command, server.url)
    assert outcome.code == 1
    assert "\x1b" not in outcome.err
    assert is_harmless(outcome.err)
    assert len(outcome.err) < 3000


@pytest.mark.parametrize(
    "answer",
    [
        b"data: " + b"[" * 200_000 + b"\n\n",
        b"data: " + b"9" * 200_000 + b"\n\n",
        b'data: {"error": ' + b'{"a":' * 100_000 + b"\n\n",
        event(content=["a"]),
        event(content={"a": 1}),
        event(content=True),
        b'data: {"choices": {"a": 1}}\n\n',
        b'data: {"choices": 7}\n\n',
        b"data: \n\n",
    ],
)
def test_an_event_that_is_none_is_an_error_of_one_line(command, answer):
    with scripted(answer) as server:
        outcome = chat(command, server.url)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said("not a chunk of an answer")
    assert len(outcome.err) < 1000


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (b"x" * 65536, "a line of the answer has more than 1048576 bytes"),
        (event(content="y" * 60_000), "the answer has more than 4194304 letters"),
    ],
    ids=["a line", "an answer"],
)
def test_what_does_not_end_is_ended_in_bounded_memory(command, piece, said):
    with scripted(piece, is_endless=True) as server:
        tracemalloc.start()
        try:
            outcome = chat(command, server.url)
            most_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert outcome.code == 1
    assert outcome.said(said)
    assert most_bytes < 60 << 20


def test_a_refusal_that_does_not_end_is_cut(command):
    with scripted(b"<p>" * 20_000, status=500, is_endless=True) as server:
        outcome = chat(command, server.url)
    assert outcome.code == 1
    assert len(outcome.err) < 1000


def test_headers_that_do_not_end_are_an_error(command):
    with scripted(b"", headers=[("x", "y" * 60_000)] * 30) as server:
        outcome = chat(command, server.url)
    assert outcome.code == 1
    assert outcome.said("no answer")


def test_a_packed_answer_is_not_unpacked(command):
    """A kilobyte would become a megabyte; the server was asked for plain bytes."""
    packed = gzip.compress(event(content="z" * 10**6))
    with scripted(packed, headers=[("content-encoding", "gzip")]) as server:
        outcome = chat(command, server.url)
    assert outcome.code == 1
    assert outcome.said("no stream of events")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_named_and_the_key_goes_nowhere(command, status):
    with scripted(event(content="stolen")) as other:
        where = [("location", f"{other.url}/stolen")]
        with scripted(b"", status=status, headers=where) as server:
            outcome = chat(command, server.url, "--api-key", "secret")
    assert outcome.code == 1
    assert outcome.said(f"it redirects to {other.url}/stolen")
    assert server.keys == ["Bearer secret"]
    assert not other.asked


def test_a_redirect_to_no_address_is_an_error(command):
    with scripted(b"", status=302, headers=[("location", "http://a/\x1b[2J")]) as server:
        outcome = chat(command, server.url)
    assert outcome.code == 1
    assert is_harmless(outcome.err)


def test_a_terminal_gets_no_control_characters_of_a_model_either(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stdout, expected in ((Terminal(), r"\x1b[2J"), (io.StringIO(), "\x1b[2J")):
        monkeypatch.setattr("sys.stdout", stdout)
        terminal.write("\x1b[2J")
        assert stdout.getvalue() == expected


def test_ctrl_c_ends_an_answer_that_never_comes(command):
    with scripted(b"", is_silent=True, on_asked=interrupt_main) as server:
        outcome = chat(command, server.url)
    assert outcome.code == 0
    assert outcome.said("(stopped)")


def test_a_conversation_goes_on_after_an_answer_with_half_a_character(command):
    """It goes back to the server with the next message."""
    with scripted(event(content="\ud83d")) as server:
        outcome = command("chat", "--url", server.url, stdin="one\ntwo\n")
    assert outcome.code == 0
    assert [message["role"] for message in server.asked[1]["messages"]] == [
        "user",
        "assistant",
        "user",
    ]


@pytest.mark.parametrize(
    ("kind", "said"), [("socks", "Unknown scheme for proxy URL"), ("socks5", "'socksio' package")]
)
def test_a_proxy_of_another_kind_is_an_error_in_one_line(command, monkeypatch, kind, said):
    """As the settings of some desktops name one for all programs."""
    monkeypatch.setenv("ALL_PROXY", f"{kind}://127.0.0.1:1080/")
    with scripted(DELTA) as server:
        outcome = chat(command, server.url)
    assert outcome.code == 1
    assert outcome.said(f"{server.url}: no answer: ")
    assert outcome.said(said)
