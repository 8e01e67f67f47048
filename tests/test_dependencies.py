"""The package runs with nothing but what it requires: no extra, no Triton, as `pip install .` on a
machine whose torch brings none.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Imports every module of the core and generates, where optional packages are not found.
PROGRAM = """
import importlib, pkgutil, sys
from importlib.machinery import PathFinder

ABSENT = {
    "triton", "fastapi", "uvicorn", "starlette", "llguidance", "prometheus_client", "matplotlib",
    "ray", "lm_eval", "openai", "anthropic", "pytest", "hypothesis", "scipy",
}

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        is_absent = name.partition(".")[0] in ABSENT
        return None if is_absent else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
import moe_infinity, moe_infinity.__main__, moe_infinity.model
for folder in ("engine", "cache", "predict", "memory", "architectures", "checkpoint", "system"):
    package = importlib.import_module(f"moe_infinity.{folder}")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
import torch
with moe_infinity.MoE(sys.argv[1], device="cpu", host_memory="50%") as moe:
    out = moe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, min_new_tokens=4)
print(out.shape[1], sorted(ABSENT & sys.modules.keys()))
"""


@pytest.mark.slow
def test_the_package_runs_without_optional_packages(tiny_checkpoint: Path):
    """slot_mlp.py imported triton, so nothing ran where torch does not bring it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_checkpoint)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "7 []"
