"""A model that is not there, or a mistyped value of an option, is an error before torch is
imported, which takes seconds.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(60)]
SCRIPT = """
import sys
from moe_infinity.__main__ import main
try:
    main()
except SystemExit as end:
    assert end.code == 1, end.code
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
COMMANDS = {
    "run": ["-p", "x"], "chat": [], "serve": [], "inspect": [], "bench": [],
    "pack": ["--experts", "int4", "-o", "packed"], "trace": ["--prompts", "{file}", "-o", "t.npz"],
}  # fmt: skip


@pytest.mark.parametrize("model", ["./there/is/nothing", "nobody/nothing"])
@pytest.mark.parametrize("command", [*COMMANDS, "plan"])
def test_a_mistyped_model_is_an_error_before_torch_is_imported(tmp_path, command, model):
    if (command, model) == ("plan", "nobody/nothing"):
        pytest.skip("plan asks the hub")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    more = [option.format(file=prompts) for option in COMMANDS.get(command, [])]
    assert error_of(tmp_path, command, model, *more).startswith(f"error: {model}: ")


def error_of(folder: Path, *arguments: str) -> str:
    """What a command says on stderr, which ends with code 1 and without torch."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=folder,
        env={"PATH": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr


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


@pytest.mark.parametrize(
    ("command", "option"), [(command, one) for command in MISTYPED for one in MISTYPED[command]]
)
def test_a_mistyped_option_is_an_error_before_torch_is_imported(tmp_path, command, option):
    """Most of these were once said after torch had been imported, and `inspect --dtype` and
    `bench --text` with a traceback.
    """
    prompts, latin = tmp_path / "prompts.jsonl", tmp_path / "latin.txt"
    prompts.write_text('{"prompt": "x"}\n')
    latin.write_bytes("café".encode("latin-1"))
    name, value = option.format(latin=latin).split()
    needed = [word.format(file=prompts) for word in COMMANDS.get(command, [])]
    error = error_of(tmp_path, command, str(tmp_path), *needed, name, value)
    assert error.startswith("error: ")
    assert value.split(",")[-1] in error


@pytest.mark.parametrize("replicas", ["nope", "2-1", "0"])
def test_a_mistyped_number_of_replicas_is_an_error(tmp_path, replicas):
    assert f"'{replicas}'" in error_of(tmp_path, "serve", str(tmp_path), "--replicas", replicas)


def test_replicas_without_ray_are_an_error_before_torch_is_imported(tmp_path):
    if find_spec("ray") is not None:
        pytest.skip("Ray is installed")
    assert "needs ray" in error_of(tmp_path, "serve", str(tmp_path), "--replicas", "2")
