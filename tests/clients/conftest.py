"""The server that clients talk to, and the table of what each of them did."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.environments import ROOT, Client, environment
from tests.clients.proxy import Proxy, proxying

KINDS = ("plain", "stream", "tools", "structured", "long", "cancel")
SIGNS = {"passed": "ok", "failed": "FAILS", "skipped": "skipped"}
ADDRESS_SPACE_BYTES = 42_000_000 << 10
START_S = 180
ENDS = ("Ġthe", "Ġof", "Ġand", "Ġto", "Ġin", "Ġa", "Ġwith", "Ġthat", "Ġon", "Ġhis", "Ġwas", "Ġit")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, ending its answers after a few words: it would seldom end one."""
    folder = tmp_path_factory.mktemp("served") / "demo"
    shutil.copytree(ROOT / "models" / "demo", folder, copy_function=os.symlink)
    vocabulary = json.loads((ROOT / "models/demo-long/tokenizer.json").read_text())["model"][
        "vocab"
    ]
    own = json.loads((folder / "generation_config.json").read_text())
    own["eos_token_id"] = [own["eos_token_id"], *(vocabulary[token] for token in ENDS)]
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").write_text(json.dumps(own))
    return folder


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("log") / "server.txt"
    options = ("--config", ROOT / "models" / "demo-long", "--host-memory", "50%", "--port", port)
    command = [sys.executable, "-m", "moe_infinity", "serve", model, *options]
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: resource.setrlimit(
                resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES)
            ),
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        sys.stderr.write(log.read_text(errors="replace")[-4000:])


def wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.2)


@pytest.fixture
def proxy(server: str, request: pytest.FixtureRequest) -> Iterator[Proxy]:
    """The way to the server; what went through it is kept beside the environments."""
    folder = ROOT / ".clients" / "exchanges"
    folder.mkdir(parents=True, exist_ok=True)
    with proxying(server) as proxy:
        yield proxy
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    (folder / f"{name}.jsonl").write_text(proxy.log())


@pytest.fixture
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Client:
    """The client that the test names, in an empty home and working folder."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "hello.py").write_text('print("hello")\n')
    (name,) = request.node.get_closest_marker("environment").args
    found = environment(name)
    assert isinstance(found, Path), found
    return Client(found, home, work)


# The table

results: dict[str, dict[str, str]] = defaultdict(dict)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    cell = {key: str(value) for key, value in report.user_properties}
    if "client" in cell and (report.when == "call" or report.outcome != "passed"):
        results[cell["client"]][cell["kind"]] = SIGNS[report.outcome]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not results:
        return
    rows = [("client", *KINDS), *[("---",) * (len(KINDS) + 1)]]
    rows += [(c, *(cells.get(kind, "–") for kind in KINDS)) for c, cells in sorted(results.items())]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
    (ROOT / ".clients").mkdir(exist_ok=True)
    (ROOT / ".clients" / "table.md").write_text(table)
    terminalreporter.write("\n" + table)
