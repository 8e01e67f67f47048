"""Agents, set up as docs/guides/agents.md says: their prompts, streams, tools and Ctrl-C.

What the model says is nonsense; what counts is that the server refuses nothing, that each answer
comes to its end, and that the agent takes it for one.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.clients.environments import Client, Outcome
from tests.clients.guide import code_under, write_under
from tests.clients.proxy import NO_CALL, Forced, Proxy

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]
PROMPT = "Say hi."
LONG = "word " * 6000
LIMIT_S = 400
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Graz"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Agent:
    """How one agent is started and answers a prompt, without a terminal."""

    heading: str  # in the guide
    options: Callable[[str], list[str]]  # for a prompt, after the guide's command
    tool: Forced  # harmless
    set_up: Callable[[Client, str], None] = lambda client, url: None
    script: Callable[[str], str] | None = None  # for a URL; else the guide's code
    variables: dict[str, str] = field(default_factory=dict)
    structured: Callable[[Client], list[str]] | None = None  # options for SCHEMA
    answer: Forced | None = None  # the tool by which it asks for that, if it is one
    has_long: bool = False  # its own prompt is tried, too

    def run(self, client: Client, proxy: Proxy, options: list[str], **limits: Any) -> Outcome:
        self.set_up(client, proxy.url)
        script = self.script or (lambda url: code_under(self.heading, url))
        command = f"{script(proxy.url).rstrip()} {shlex.join(options)}"
        limits = {"limit_s": LIMIT_S} | limits
        return client.run(["bash", "-ec", command], variables=self.variables, **limits)


def codex(client: Client, url: str) -> None:
    write_under("Codex", url, client.home / ".codex" / "config.toml")


def schema_file(client: Client) -> list[str]:
    (client.work / "schema.json").write_text(json.dumps(SCHEMA))
    return ["--output-schema", "schema.json"]


def opencode(client: Client, url: str) -> None:
    write_under("opencode", url, client.work / "opencode.json")


AGENTS = {
    "claude-code": Agent(
        "Claude Code",
        lambda prompt: [
            *("-p", prompt, "--system-prompt", "Be brief.", "--tools", "Read"),
            *("--allowedTools", "Read"),
        ],
        Forced("Read", {"file_path": "hello"}),
        variables={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        structured=lambda client: ["--json-schema", json.dumps(SCHEMA)],
        answer=Forced("StructuredOutput", {"city": "Graz"}),
        has_long=True,
    ),
    "codex": Agent(
        "Codex",
        lambda prompt: [prompt],
        Forced("exec_command", {"cmd": "true"}),
        set_up=codex,
        script=lambda url: "codex exec --skip-git-repo-check",
        structured=schema_file,
        answer=NO_CALL,
    ),
    "opencode": Agent(
        "opencode",
        lambda prompt: [prompt],
        Forced("glob", {"pattern": "hello"}),
        set_up=opencode,
        script=lambda url: "opencode run",
        variables={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    "copilot": Agent(
        "GitHub Copilot CLI",
        lambda prompt: ["-p", prompt, "--allow-all-tools", "--available-tools", "view"],
        Forced("view", {"path": "hello"}),
    ),
    "qwen-code": Agent(
        "Qwen Code",
        lambda prompt: [
            *("-p", prompt, "--system-prompt", "Be brief.", "--yolo"),
            *("--core-tools", "list_directory"),
        ],
        Forced("list_directory", {"path": "hello"}),
    ),
    "cline": Agent(
        "Cline",
        lambda prompt: ["-s", "Be brief.", prompt],
        Forced("read_files", {"paths": "hello"}),
    ),
    "aider": Agent(
        "aider",
        lambda prompt: [
            *("--message", prompt, "--yes-always", "--no-git", "--no-show-model-warnings"),
            *("--analytics-disable", "--no-check-update", "--no-browser"),
        ],
        NO_CALL,
    ),
}


def cases(kind: str, *, has: Callable[[Agent], bool] = lambda agent: True) -> pytest.MarkDecorator:
    """One case for each agent that has this, with its environment and its cell of the table."""
    return pytest.mark.parametrize(
        ("name", "kind"),
        [
            pytest.param(name, kind, marks=pytest.mark.environment(name), id=name)
            for name, agent in AGENTS.items()
            if has(agent)
        ],
    )


@pytest.fixture
def agent(name: str, kind: str, record_property: Callable[[str, object], None]) -> Agent:
    record_property("client", name)
    record_property("kind", kind)
    return AGENTS[name]


def check(proxy: Proxy, outcome: Outcome) -> None:
    """The server refused nothing, every answer ended, and the agent is content."""
    said = f"{outcome}\n{[(e.path, e.status, e.is_over) for e in proxy.exchanges]}"
    assert proxy.refused == [], said
    assert proxy.generated, said
    assert all(exchange.ended_well for exchange in proxy.generated), said
    assert outcome.code == 0, said


@cases("stream")
def test_an_answer_streams_to_its_end(agent, client, proxy):
    outcome = agent.run(client, proxy, agent.options(PROMPT))
    check(proxy, outcome)
    assert any(exchange.is_stream for exchange in proxy.generated)


@cases("tools", has=lambda agent: bool(agent.tool.name))
def test_a_forced_call_runs_and_its_result_is_taken(agent, client, proxy):
    proxy.forced = agent.tool
    outcome = agent.run(client, proxy, agent.options(PROMPT))
    offered = {json.dumps(e.body.get("tools"))[:3000] for e in proxy.generated}
    assert proxy.forced is None, f"no such tool: {offered}\n{outcome}"
    check(proxy, outcome)
    assert any(exchange.has_result for exchange in proxy.generated), outcome


@cases("structured", has=lambda agent: agent.structured is not None)
def test_an_answer_keeps_to_a_schema(agent, client, proxy):
    options = [*agent.structured(client), *agent.options(PROMPT)]
    proxy.forced = agent.answer
    outcome = agent.run(client, proxy, options)
    check(proxy, outcome)
    assert "Graz" in outcome.out


@cases("long", has=lambda agent: agent.has_long)
def test_its_own_prompt_is_read_once(agent, client, proxy):
    """The second time nearly all of it is kept; the first words of the user differ."""
    for prompt in (PROMPT, "Read hello.py."):
        outcome = agent.run(client, proxy, ["-p", prompt], limit_s=900)
        check(proxy, outcome)
    last = max(proxy.generated, key=lambda exchange: (len(str(exchange.body)), exchange.is_over))
    counted = re.findall(rb'"cache_read_input_tokens": ?(\d+)', last.answer)
    assert max(map(int, counted)) > 20_000, last.answer[:500]


@cases("cancel")
def test_ctrl_c_while_a_prompt_is_read_stops_the_server(agent, client, proxy):
    def is_reading() -> bool:
        return any(e.status == 200 and len(json.dumps(e.body)) > len(LONG) for e in proxy.generated)

    outcome = agent.run(client, proxy, agent.options(LONG), stop_when=is_reading)
    assert proxy.refused == []
    assert outcome.code is None, f"it ended before it could be stopped: {outcome}"
    # A stream says something every 10 s, which the proxy cannot pass on.
    proxy.wait_until_idle(20)
