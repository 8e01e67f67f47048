"""What the command line says when it cannot do what it was asked: one message on stderr, nothing on
stdout, exit code 2 for wrong usage and 1 for the rest."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import transformers

from moe_infinity.cli import chat_client
from moe_infinity.cli.models import pieces_of
from moe_infinity.loading import kind
from moe_infinity.tools.doctor import examination

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    "args",
    [
        ["run", "MODEL", "-p", "w5", "--nonsense"],
        ["run", "MODEL"],
        ["run"],
        ["nonsense"],
        ["run", "MODEL", "-p", "w5", "--max-new-tokens", "0"],
        ["run", "MODEL", "-p", "w5", "--max-new-tokens", "many"],
        ["run", "MODEL", "-p", "w5", "--temperature", "-1"],
        ["trace", "MODEL", "--prompts", "not_there.jsonl", "-o", "out.npz"],
        ["trace", "MODEL"],
    ],
)
def test_wrong_usage_is_code_2_with_a_message_on_stderr(command, tiny_checkpoint, args):
    outcome = command(*(tiny_checkpoint if arg == "MODEL" else arg for arg in args))
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.strip()


@pytest.mark.parametrize("args", [["run", "-p", "w5"], ["inspect"], ["bench"], ["plan"]])
def test_a_folder_of_something_else_is_said_to_have_no_config(command, tmp_path, args):
    name, *more = args
    outcome = command(name, tmp_path, *more)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said(f"{tmp_path}: no usable config.json: the folder has none")
    assert outcome.said("name the folder that has it")


def test_a_package_that_a_setting_needs_is_named(command, tiny_checkpoint, copy_of):
    folder = copy_of(tiny_checkpoint)
    settings = {"cache_implementation": "quantized", "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    outcome = command("run", folder, "-p", "w5", "--max-new-tokens", 4)
    assert outcome.code == 1
    assert outcome.said("optimum-quanto")


def test_for_a_file_of_weights_its_folder_is_named(command, tiny_checkpoint):
    outcome = command("run", f"{tiny_checkpoint}/model.safetensors", "-p", "w5")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said(f"hint: its folder is {tiny_checkpoint}")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--host-memory", "1"], "holds no expert"),
        (["--host-memory", "lots"], "'lots' is not a size"),
        (["--host-memory", "4000TiB"], "machine"),
        (["--policy", "no-such-policy"], "'no-such-policy'"),
        (["--dtype", "int3"], "'int3'"),
        (["--experts-implementation", "magic"], "'magic'"),
    ],
)
def test_a_value_that_cannot_be_used_is_an_error_on_stderr(command, tiny_checkpoint, args, said):
    outcome = command("run", tiny_checkpoint, "-p", "w5", *args)
    assert outcome.code in ((1,) if "--host-memory" in args else (1, 2))
    assert outcome.out == ""
    assert outcome.said(said)


@pytest.mark.parametrize(
    "args",
    [
        ["run", "FOLDER", "-p", "w5"],
        ["run", "FOLDER", "-p", "w5", "--json"],
        ["inspect", "FOLDER"],
        ["inspect", "FOLDER", "--json"],
        ["chat", "FOLDER"],
    ],
)
def test_a_model_that_is_not_there_is_code_1_and_named(command, tmp_path, args):
    folder = tmp_path / "no_such_model"
    outcome = command(*(folder if arg == "FOLDER" else arg for arg in args))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said("no_such_model")


@pytest.mark.parametrize("value", ["[bold]8GiB", "[/red]8GiB", "[link=x]", ":smile:"])
def test_a_message_shows_what_was_typed_and_does_not_take_it_for_markup(
    command, tiny_checkpoint, value
):
    outcome = command("run", tiny_checkpoint, "-p", "w5", "--host-memory", value)
    assert outcome.code == 1
    assert value in outcome.err


def test_a_message_does_not_break_paths_into_lines(command, tmp_path):
    """Whoever reads stderr from a file or a pipe wants to copy the path."""
    folder = tmp_path / ("a-long-name-" * 10)
    assert str(folder) in command("inspect", folder).err


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["trace", "--help"]])
def test_help_is_code_0_on_stdout(command, args):
    outcome = command(*args)
    assert outcome.code == 0
    assert "Usage" in outcome.out


@pytest.mark.parametrize("args", [["-p", "caf\udcc3"], ["-p", "-"]])
def test_a_prompt_that_is_no_utf8_is_refused_before_a_model_is_looked_for(command, args):
    outcome = command("run", "no-such-model", *args, stdin="caf\udcc3")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said("prompt is not UTF-8 text")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["inspect", "caf\udcc3"], "model"),
        (["serve", "no-such-model", "--api-key", "a", "--api-key", "caf\udcc3"], "--api-key"),
        (["run", "no-such-model", "-p", "x", "--config", "caf\udcc3"], "--config"),
    ],
)
def test_an_option_that_is_no_utf8_is_named(command, args, named):
    """Tokenizers cannot open such a folder, and no request or answer can have such a name."""
    outcome = command(*args)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said(f"error: {named} is not UTF-8 text")


def test_a_file_may_have_a_name_that_is_no_utf8(command, tmp_path):
    traces = tmp_path / "caf\udcc3.npz"
    traces.touch()
    outcome = command("simulate", traces)
    assert outcome.code == 1
    assert "UTF-8" not in outcome.err


def test_a_message_of_a_chat_that_is_no_utf8_ends_it(command, monkeypatch):
    def answer(*_: object) -> Iterator[str]:
        raise AssertionError("it must not be sent")

    monkeypatch.setattr(chat_client, "stream_chat", answer)
    monkeypatch.setattr("builtins.input", lambda: "caf\udcc3")
    outcome = command("chat", "--url", "http://127.0.0.1:1")
    assert outcome.code == 1
    assert outcome.said("error: the input is not UTF-8 text")


def test_a_deleted_folder_is_an_error_at_once(tmp_path):
    """torch would end the process with a message of its own."""
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir {shlex.quote(str(gone))}; exec {shlex.quote(sys.executable)} -m moe_infinity"
    path = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        ["sh", "-c", f"{command} doctor"], cwd=gone, env=path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: the current folder was deleted: change to another one\n"


def test_without_docstrings_it_is_said_that_transformers_needs_them(
    command, tiny_checkpoint, monkeypatch
):
    """Once its config.json was said to be wrong. A process with -OO would compile all of torch."""

    def parse_docstring(*_: object, **__: object) -> None:
        raise ValueError("No `Args` section is found in the docstring")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", parse_docstring)
    assert command("inspect", tiny_checkpoint).said("does not understand its config.json")
    monkeypatch.setattr(kind, "sys", SimpleNamespace(flags=SimpleNamespace(optimize=2)))
    assert command("inspect", tiny_checkpoint).said("docstrings, which python -OO leaves out")


def test_a_system_without_proc_is_said(command, tiny_checkpoint, monkeypatch, tmp_path):
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    outcome = command("run", tiny_checkpoint, "-p", "w5")
    assert outcome.code == 1
    assert outcome.said("error: the system does not say how much memory there is")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_process_without_more_memory_says_so(command, monkeypatch, error):
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(examination, "examine", fail)
    outcome = command("doctor", "--quick")
    assert outcome.code == 1
    assert outcome.said("error: the system gives this process no more memory")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_help_is_shown_in_any_encoding(encoding):
    command = [sys.executable, "-m", "moe_infinity", "run", "--help"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert b"--host-memory" in done.stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"do_sample": True, "typical_p": 0.0}, "ValueError: `typical_p` has to be"),
        ({"exponential_decay_length_penalty": [1]}, "IndexError: list index out of range"),
        ({"forced_eos_token_id": [1 << 20]}, "IndexError: index 1048576"),
        pytest.param(
            {"cache_implementation": "offloaded"},
            "",  # each torch without a GPU says another thing
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it needs a GPU"),
        ),
    ],
)
def test_settings_that_transformers_does_not_take_are_an_error(
    settings, said, command, copy_of, tiny_checkpoint
):
    folder = copy_of(tiny_checkpoint)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    outcome = command("run", folder, "-p", "w5", "--max-new-tokens", 2)
    assert outcome.code == 1
    assert outcome.said(f"error: transformers cannot generate with these settings: {said}")


def test_an_error_inside_a_pass_is_none_of_settings(resident_model, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ValueError("a fault of ours")

    monkeypatch.setattr(resident_model.model, "forward", fail)
    stream = resident_model.stream("w5", max_new_tokens=2)
    with pytest.raises(ValueError, match="^a fault of ours"):
        list(pieces_of(stream))


@pytest.mark.parametrize(
    ("template", "said"),
    [("{% if %}", "TemplateSyntaxError"), ("{{ raise_exception('no tools') }}", "no tools")],
)
def test_a_chat_template_that_fails_is_an_error(template, said, command, copy_of, tiny_checkpoint):
    folder = copy_of(tiny_checkpoint)
    (folder / "chat_template.jinja").write_text(template)
    outcome = command("chat", folder, stdin="w5\n")
    assert outcome.code == 1
    assert outcome.said("error: the model's chat template fails")
    assert outcome.said(said)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--version >/dev/full", "stdout cannot be written: No space left"),
        ("--version >&-", "stdout is closed"),
        ("run --help >/dev/full", "No space left"),
        ("serve --help-limits >/dev/full", "No space left"),
        ("run no-such-model -p - <&-", "no-such-model: neither a folder nor"),
    ],
)
def test_streams_that_are_closed_or_take_nothing_are_an_error(arguments, said):
    command = f"{shlex.quote(sys.executable)} -m moe_infinity {arguments}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.count("\n") <= 2  # with a hint


@pytest.mark.slow
def test_a_reader_that_leaves_early_ends_the_command_without_a_traceback(tiny_checkpoint):
    """`moe-infinity run ... | head -c 1`, in processes of their own."""
    program = f"""
import sys
from moe_infinity import __main__ as cli
sys.argv = ["moe-infinity", "run", {str(tiny_checkpoint)!r}, "-p", "w5", "--max-new-tokens", "200",
            "--host-memory", "25%"]
cli.main()
"""
    reader: Any = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdout=reader, stderr=reader) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read().decode()
