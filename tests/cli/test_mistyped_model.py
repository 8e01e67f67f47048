"""A model that is not there, or a mistyped value of an option, is an error before torch is
imported, which takes seconds.
"""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.parametrize("command", ["run", "serve"])
@pytest.mark.parametrize(
    ("option", "value"), [("--policy", "nope"), ("--host-memory", "nope"), ("--dtype", "nope")]
)
def test_a_mistyped_option_is_an_error_before_torch_is_imported(tmp_path, command, option, value):
    arguments = [command, str(tmp_path), *COMMANDS[command], option, value]
    assert "'nope'" in error_of(tmp_path, *arguments)
