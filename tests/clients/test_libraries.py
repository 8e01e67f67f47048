"""Libraries: one program each, in tests/clients/programs, for every kind of use."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.clients.proxy import Forced

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]
PROGRAMS = Path(__file__).parent / "programs"
LIMIT_S = 150
ALL = ("plain", "stream", "tools", "structured", "cancel")
# By name in the table: the environment, the program, the API that it uses, and what it has.
LIBRARIES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "openai (Node)": ("javascript", "openai.mjs", "chat", ALL),
    "openai (Node), responses": ("javascript", "openai.mjs", "responses", ALL),
    "@anthropic-ai/sdk": ("javascript", "anthropic.mjs", "messages", ALL),
    "AI SDK": ("javascript", "ai_sdk.mjs", "chat", ALL),
    "AI SDK, responses": ("javascript", "ai_sdk.mjs", "responses", ALL),
    "AI SDK, messages": ("javascript", "ai_sdk.mjs", "messages", ALL),
    "LangChain (JS)": ("langchain-js", "langchain.mjs", "chat", ALL),
    "LangChain (JS), responses": ("langchain-js", "langchain.mjs", "responses", ALL),
    "LangChain (JS), messages": ("langchain-js", "langchain.mjs", "messages", ALL),
    "LangChain (JS), Ollama": (
        "langchain-js",
        "langchain.mjs",
        "ollama",
        ("plain", "stream", "structured", "cancel"),
    ),
    "ollama (JS)": (
        "javascript",
        "ollama.mjs",
        "ollama",
        ("plain", "stream", "structured", "cancel"),
    ),
    "openai-agents": ("python", "openai_agents.py", "responses", ALL),
    "openai-agents, chat": ("python", "openai_agents.py", "chat", ALL),
    "pydantic-ai": ("python", "pydantic_agents.py", "chat", ALL),
    "pydantic-ai, responses": ("python", "pydantic_agents.py", "responses", ALL),
    "langchain-openai": ("python", "langchain_models.py", "chat", ALL),
    "langchain-openai, responses": ("python", "langchain_models.py", "responses", ALL),
    "langchain-anthropic": ("python", "langchain_models.py", "messages", ALL),
    "instructor": ("instructor", "instructor_modes.py", "chat", ("structured",)),
    "instructor, responses": ("instructor", "instructor_modes.py", "responses", ("structured",)),
    "instructor, messages": ("instructor", "instructor_modes.py", "messages", ("structured",)),
    "litellm openai/": ("python", "litellm_calls.py", "openai", ALL[:4]),
    "litellm hosted_vllm/": ("python", "litellm_calls.py", "hosted_vllm", ALL[:4]),
    "litellm anthropic/": ("python", "litellm_calls.py", "anthropic", ALL[:3]),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=pytest.mark.environment(library[0]), id=f"{name}-{kind}")
        for name, library in LIBRARIES.items()
        for kind in library[3]
    ],
)
def test_a_library_gets_what_it_asks_for(name, kind, client, proxy, record_property):
    record_property("client", name)
    record_property("kind", kind)
    _, program, api, _ = LIBRARIES[name]
    for file in PROGRAMS.iterdir():
        if file.is_file():
            shutil.copy(file, client.work)
    if program.endswith(".mjs"):
        os.symlink(client.environment / "node_modules", client.work / "node_modules")
        command = ["node", program]
    else:
        command = ["python", program]
    if kind == "tools" and name.startswith("pydantic-ai"):
        proxy.forced = Forced("weather", {"city": "Graz"})
    outcome = client.run([*command, proxy.url, api, kind], limit_s=LIMIT_S)
    proxy.check(outcome, kind)
