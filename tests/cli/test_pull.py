"""`moe-infinity pull`, and commands whose model is not on this machine."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import huggingface_hub.constants
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from moe_infinity.cli import terminal
from moe_infinity.cli.hub import find_download
from tests.fake_hub import FakeHub

pytestmark = pytest.mark.timeout(60)
RUN = ["run", "some/model", "-p", "w5 w6", "--max-new-tokens", "4"]


@pytest.fixture
def hub(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeHub]:
    """With the tiny checkpoint as some/model."""
    with FakeHub() as hub:
        hub.add("some/model", tiny_checkpoint)
        hub.used_here(monkeypatch, tmp_path / "cache")
        yield hub


class Keyboard(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands with stdin and stderr of a terminal; what is typed is `stdin` of the command."""
    monkeypatch.setattr(io, "StringIO", Keyboard)
    monkeypatch.setattr(terminal.stderr, "_force_terminal", True)
    monkeypatch.setattr(terminal.stderr, "is_interactive", True)
    monkeypatch.setenv("TERM", "xterm")


def test_pull_downloads_and_prints_the_command_that_runs_it(command, hub, tmp_path):
    outcome = command("pull", "some/model")
    assert (outcome.code, outcome.out) == (
        0, "moe-infinity run some/model -p 'Once upon a time'\n",
    )  # fmt: skip
    assert outcome.said(f"of which 0 bytes are here, in {tmp_path / 'cache'}")


def test_a_pulled_model_runs_without_a_network(command, hub, tiny_checkpoint):
    command("pull", "some/model")
    hub.close()
    there = command("run", tiny_checkpoint, *RUN[2:])
    assert command(*RUN) == there
    assert there.code == 0


def test_a_file_that_is_not_whole_is_fetched_again(command, hub, tiny_checkpoint, tmp_path):
    command("pull", "some/model")
    file = next((tmp_path / "cache").rglob("snapshots/*/model.safetensors"))
    os.truncate(file, 10)
    assert command("pull", "some/model").code == 0
    assert file.read_bytes() == (tiny_checkpoint / "model.safetensors").read_bytes()
    hub.requests.clear()
    assert command("pull", "some/model").code == 0
    assert not any("model.safetensors" in str(request) for request in hub.requests)


def test_a_revision_is_run_by_its_folder(command, hub, tiny_checkpoint, tmp_path):
    commit = hub.add("some/model", tiny_checkpoint, revisions=("main", "v2"))
    outcome = command("pull", "some/model", "--revision", "v2")
    folder = tmp_path / "cache" / "models--some--model" / "snapshots" / commit
    assert outcome.out == f"moe-infinity run {folder} -p 'Once upon a time'\n"


def test_a_model_without_experts_is_a_warning(command, hub, tmp_path):
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "dense")
    hub.add("some/dense", tmp_path / "dense")
    outcome = command("pull", "some/dense")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.said("warning:")
    assert outcome.said("experts")


def test_a_wrong_id_is_code_1(command, hub):
    outcome = command("pull", "some/nothing")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said("no such model")


OTHERS = [
    RUN,
    ["chat", "some/model"],
    ["serve", "some/model", "--port", "0"],
    ["inspect", "some/model"],
    ["pack", "some/model", "--experts", "int4", "-o", "packed"],
    ["trace", "some/model", "--prompts", "PROMPTS", "-o", "out.npz"],
]


@pytest.mark.parametrize("args", OTHERS, ids=lambda args: args[0])
def test_without_a_terminal_nothing_is_downloaded_unasked(command, hub, tmp_path, args):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "w5"}))
    outcome = command(*(prompts if arg == "PROMPTS" else arg for arg in args))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said("`moe-infinity pull some/model`, or by --yes with this command")
    assert hub.requests == []


def test_yes_downloads_without_a_question(command, hub, tiny_checkpoint):
    expected = command("run", tiny_checkpoint, *RUN[2:]).out
    outcome = command(*RUN, "--yes")
    assert (outcome.code, outcome.out) == (0, expected)


@pytest.mark.usefixtures("on_a_terminal")
def test_on_a_terminal_the_download_is_asked_for(command, hub, tmp_path):
    outcome = command(*RUN, stdin="n\n")
    assert (outcome.code, outcome.out) == (1, "")
    assert "some/model: not downloaded" in outcome.err
    assert not any("/resolve/" in request.path for request in hub.requests)
    outcome = command(*RUN, stdin="y\n")
    assert (outcome.code, bool(outcome.out)) == (0, True)
    question = f"into {tmp_path / 'cache'}? [y/N]"
    assert outcome.said(question)
    assert question.replace(" ", "") not in "".join(command(*RUN).err.split())


@pytest.mark.usefixtures("on_a_terminal")
def test_no_answer_is_a_no(command, hub):
    assert command(*RUN, stdin="").said("some/model: not downloaded")


def test_offline_the_variable_is_named(command, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for args in (["pull", "some/model"], [*RUN, "--yes"]):
        outcome = command(*args)
        assert outcome.code == 1
        assert outcome.said("HF_HUB_OFFLINE is set")


def test_a_server_of_a_hub_id_is_called_by_it(command, hub, monkeypatch):
    from moe_infinity.server import serve

    names = []
    monkeypatch.setattr(serve, "serve_model", lambda moe, config, sockets: names.append(config))
    command("serve", "some/model", "--yes", "--port", "0")
    (config,) = names
    assert config.served_name == "some/model"


@pytest.mark.usefixtures("on_a_terminal")
def test_loading_shows_a_bar_on_a_terminal(command, tiny_checkpoint):
    outcome = command("run", tiny_checkpoint, *RUN[2:], "--preload", "wait")
    assert "loading weights" in outcome.err
    assert "loading experts" in outcome.err


def test_without_a_terminal_there_is_no_bar(command, tiny_checkpoint):
    assert command("run", tiny_checkpoint, *RUN[2:], "--preload", "wait").err == ""


def wait_for(holds, process: subprocess.Popen[str]) -> None:
    while not holds():
        assert process.poll() is None
        time.sleep(0.02)


def test_after_ctrl_c_the_same_command_fetches_only_the_rest(hub, tmp_path):
    """In a process of its own, with a file that stops in the middle once the other one is here."""
    chunk = huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    os.truncate(folder / "model.safetensors", 3 * chunk)
    hub.add("some/model", folder)
    hub.faults.cut_at = 2 * chunk + 1000
    hub.faults.num_cuts = 1
    hub.faults.resumes = Event()  # never: until the process has ended
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "moe_infinity", "pull", "some/model"]
    environment = hub.environment(cache)

    def is_half_here() -> bool:
        sizes = [file.stat().st_size for file in cache.glob("models--some--model/blobs/*")]
        return len(sizes) == 2 and max(sizes) >= 2 * chunk

    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        wait_for(is_half_here, process)
        began = time.monotonic()
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert time.monotonic() - began < 10
    assert process.returncode == 130
    assert "the same command goes on" in err
    assert "Traceback" not in err
    hub.faults.resumes.set()
    hub.requests.clear()
    find_download("some/model").run()
    assert hub.bytes_asked("model.safetensors") == [None]
    assert hub.bytes_asked("config.json") == []
