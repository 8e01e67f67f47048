"""A model that is not there, or a mistyped value of an option, is an error before torch is
imported, which takes seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(60)]
# Each command is a fork of one Python that has imported what all of them need, which takes longer
# than a command.
SCRIPT = """
import gc, json, os, sys
import huggingface_hub.hf_api, pydantic.type_adapter
from moe_infinity import __main__ as cli

gc.disable()
gc.freeze()
for line in sys.stdin:
    folder, *arguments = json.loads(line)
    process = os.fork()
    if not process:
        os.chdir(folder)
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600), descriptor)
        sys.argv = ["moe-infinity", *arguments]
        code = None
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        assert code == 1, code
        assert not {"torch", "transformers"} & sys.modules.keys()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""
COMMANDS = {
    "run": ["-p", "x"], "chat": [], "serve": [], "inspect": [], "bench": [],
    "pack": ["--experts", "int4", "-o", "packed"], "trace": ["--prompts", "{file}", "-o", "t.npz"],
}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("model", ["./there/is/nothing", "nobody/nothing"])
@pytest.mark.parametrize("command", [*COMMANDS, "plan"])
def test_a_mistyped_model_is_an_error_before_torch_is_imported(tmp_path, error_of, command, model):
    if (command, model) == ("plan", "nobody/nothing"):
        pytest.skip("plan asks the hub")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    more = [option.format(file=prompts) for option in COMMANDS.get(command, [])]
    assert error_of(command, model, *more).startswith(f"error: {model}: ")


def test_a_text_in_the_place_of_a_model_is_an_error_like_others(error_of):
    assert error_of("inspect", "Write a haiku about rain. " * 20).startswith("error: Write a haiku")


@pytest.fixture(scope="module")
def commands() -> Iterator[subprocess.Popen[str]]:
    environment = {"PATH": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


@pytest.fixture
def error_of(commands: subprocess.Popen[str], tmp_path: Path) -> Callable[..., str]:
    """error_of("run", ...) -> what the command says on stderr, which ends with code 1 and without
    torch.
    """

    def run(*arguments: str) -> str:
        assert commands.stdin is not None
        assert commands.stdout is not None
        print(json.dumps([str(tmp_path), *arguments]), file=commands.stdin, flush=True)
        code = int(commands.stdout.readline())
        said = (tmp_path / "stderr").read_text()
        assert (code, (tmp_path / "stdout").read_text()) == (0, ""), said
        return said

    return run


MODEL_OPTIONS = ("--policy nope", "--host-memory nope", "--dtype nope", "--history no/nope")
MISTYPED = {
    "run": (*MODEL_OPTIONS, "--report-html no/nope"),
    "chat": MODEL_OPTIONS,
    "serve": (
        *MODEL_OPTIONS, "--router nope", "--prefix-cache nope", "--api-key-file nope",
        "--cors nope",
    ),
    "inspect": ("--dtype nope",),
    "bench": (
        "--policy nope", "--host-memory nope", "--host-memory 50%,nope", "--dtype nope",
        "--prompt nope", "--text {latin}",
    ),
    "pack": ("--experts nope", "--group-size 7", "--rounding nope"),
    "trace": (
        "--dtype nope", "--host-memory nope", "--output no/nope", "--plot nope",
        "--prompts {latin}",
    ),
    "plan": ("--host-memory nope", "--machine nope"),
    "simulate": ("--policy nope", "--plot nope"),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("command", "option"), [(command, one) for command in MISTYPED for one in MISTYPED[command]]
)
def test_a_mistyped_option_is_an_error_before_torch_is_imported(
    tmp_path, error_of, command, option
):
    """Most of these were once said after torch had been imported, and `inspect --dtype` and
    `bench --text` with a traceback.
    """
    prompts, latin = tmp_path / "prompts.jsonl", tmp_path / "latin.txt"
    prompts.write_text('{"prompt": "x"}\n')
    latin.write_bytes("café".encode("latin-1"))
    name, value = option.format(latin=latin).split()
    needed = [word.format(file=prompts) for word in COMMANDS.get(command, [])]
    error = error_of(command, str(tmp_path), *needed, name, value)
    assert error.startswith("error: ")
    assert value.split(",")[-1] in error


@pytest.mark.parametrize("replicas", ["nope", "2-1", "0"])
def test_a_mistyped_number_of_replicas_is_an_error(tmp_path, error_of, replicas):
    assert f"'{replicas}'" in error_of("serve", str(tmp_path), "--replicas", replicas)


def test_replicas_without_ray_are_an_error_before_torch_is_imported(tmp_path, error_of):
    if find_spec("ray") is not None:
        pytest.skip("Ray is installed")
    assert "needs ray" in error_of("serve", str(tmp_path), "--replicas", "2")
