"""A model that is not there is an error before torch is imported, which takes seconds."""

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
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, command, model, *more],
        cwd=tmp_path,
        env={"PATH": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.startswith(f"error: {model}: ")
