"""Every code block of README and of the pages for newcomers runs (documented_code.py)."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import typer.core
import typer.main

from moe_infinity import __main__ as cli
from tests.documented_code import (
    NOT_RUN,
    ONLY_PARSED,
    PAGES,
    ROOT,
    SERVER,
    Block,
    begins_with,
    blocks_of,
    commands_of,
    python_of,
    substituted,
)

CHECKED = ("sh", "python", "json")
SHOWN = ("text", "toml")  # output, and files of other programs
READY_S = 240  # on a busy machine

every_page = pytest.mark.parametrize(
    "page", PAGES, ids=[page.relative_to(ROOT).as_posix() for page in PAGES]
)
QUICK = ("README.md", "docs/start/first-run.md")
readme_soon_others_slowly = pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for page in PAGES
        for name in [page.relative_to(ROOT).as_posix()]
    ],
)


@pytest.fixture(scope="session")
def gguf_of_demo(tmp_path_factory) -> Path:
    from tools.convert_to_gguf import convert

    file = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    convert(ROOT / "models" / "demo", file, "q8_0")
    return file


@pytest.fixture(scope="session")
def ran() -> set[tuple[str, ...]]:
    """Commands that ran already and left no file: pages repeat them."""
    return set()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where the commands of a page run, one after the other."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "The old house"}\n{"prompt": "A fever"}\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@every_page
def test_every_block_says_its_language(page):
    assert {block.language for block in blocks_of(page)} <= {*CHECKED, *SHOWN}


@readme_soon_others_slowly
def test_the_code_of_a_page_runs(page, command, gguf_of_demo, folder, ran):
    for block in blocks_of(page):
        if block.language == "json":
            json.loads(block.code)
        elif block.language == "python":
            compiled = compile(python_of(block), str(page), "exec")
            if not block.needs_server:
                exec(compiled, {"__name__": "documented"})
        elif block.language == "sh":
            for words in commands_of(block):
                run_words(words, command, gguf_of_demo, ran)


def run_words(words, command, gguf, ran) -> None:
    """Run a command, or parse it where it is not to be run. Anything unknown fails."""
    if begins_with(words, NOT_RUN):
        return
    if words[0] == "echo":
        subprocess.run(" ".join(words), shell=True, check=True)
        return
    if words[0] == "curl":
        curl_body(words)
        return
    assert words[0] == "moe-infinity", words
    arguments = substituted(words[1:], gguf)
    parse(arguments)
    if arguments[0] in ONLY_PARSED or "--cluster" in arguments or tuple(arguments) in ran:
        return
    outcome = command(*arguments)
    allowed = {0, 1} if arguments[0] == "doctor" else {0}  # 1: a machine with a problem
    assert outcome.code in allowed, f"{' '.join(arguments)}\n{outcome.err}"
    if not {"-o", "--output", "--history", "--plot"} & set(arguments):
        ran.add(tuple(arguments))


def parse(arguments: list[str]) -> None:
    """Raises click.UsageError for an unknown command or option."""
    group = typer.main.get_command(cli.app)
    assert isinstance(group, typer.core.TyperGroup)
    context = group.make_context("moe-infinity", list(arguments), resilient_parsing=False)
    name, subcommand, rest = group.resolve_command(context, list(arguments))
    assert subcommand is not None  # else it has raised
    subcommand.make_context(name, rest, parent=context)


def curl_body(words: list[str]) -> tuple[str, dict[str, object]]:
    """Path and body of a request; the body has to be JSON."""
    url = next(word for word in words if word.startswith("http"))
    return urlsplit(url).path, json.loads(words[words.index("-d") + 1])


# with a server


@pytest.mark.slow
@pytest.mark.timeout(900)
@every_page
def test_servers_of_a_page_start_and_its_clients_are_answered(page, gguf_of_demo, folder):
    blocks = list(blocks_of(page))
    commands = [words for block in blocks if block.language == "sh" for words in commands_of(block)]
    for words in commands:
        if words[0] == "echo":
            subprocess.run(" ".join(words), shell=True, check=True)
    ours = [words[1:] for words in commands if words[0] == "moe-infinity"]
    servers = [substituted(arguments, gguf_of_demo) for arguments in ours if "serve" in arguments]
    if not servers:
        pytest.skip("the page has no server")
    for number, arguments in enumerate(servers):
        with served(arguments) as address:
            ask(address, arguments)
            if number == 0:
                for block in blocks:
                    run_client(block, address)


@contextmanager
def served(arguments: list[str]) -> Iterator[str]:
    """The address of `moe-infinity serve`, once it is ready. It has to end well by Ctrl-C."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    command = [sys.executable, "-m", "moe_infinity", *arguments]
    port = address.partition(":")[2]
    with subprocess.Popen([*command, "--port", port], stderr=subprocess.PIPE, text=True) as process:
        try:
            await_ready(address, process)
            yield address
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=READY_S)
    assert process.returncode in (0, 130), errors


def await_ready(address: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()[1]
        try:
            if httpx.get(f"http://{address}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise AssertionError("the server was not ready in time")


def ask(address: str, arguments: list[str]) -> None:
    headers = {}
    if "--api-key-file" in arguments:
        key = Path(arguments[arguments.index("--api-key-file") + 1]).read_text().strip()
        headers = {"Authorization": f"Bearer {key}"}
    body = {"prompt": "Once", "max_tokens": 1}
    url = f"http://{address}/v1/completions"
    assert httpx.post(url, json=body, headers=headers, timeout=READY_S).status_code == 200


def run_client(block: Block, address: str) -> None:
    if not block.needs_server:
        return
    if block.language == "python":
        exec(
            compile(python_of(block, address), str(block.page), "exec"), {"__name__": "documented"}
        )
    if block.language != "sh":
        return
    for words in commands_of(block):
        if words[0] == "curl":
            path, body = curl_body(words)
            answer = httpx.post(f"http://{address}{path}", json=body, timeout=READY_S)
            assert answer.status_code == 200, answer.text
        elif words[:2] == ["moe-infinity", "chat"]:
            arguments = [word.replace(SERVER, address) for word in words[1:]]
            command = [sys.executable, "-m", "moe_infinity", *arguments]
            done = subprocess.run(
                command,
                input="What is a fever?\n\n",
                capture_output=True,
                text=True,
                timeout=READY_S,
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()


def test_an_unknown_option_fails():
    with pytest.raises(Exception, match="No such option"):
        parse(["serve", "models/demo", "--no-such-option"])


def test_an_unknown_command_fails():
    with pytest.raises(Exception, match="No such command"):
        parse(["no-such-command"])
