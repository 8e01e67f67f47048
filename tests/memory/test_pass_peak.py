"""A pass over a tail behind a long known prefix takes no more memory than was estimated."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

from tests.memory import pass_peak
from tests.memory.conftest import ELSEWHERE_BYTES


@pytest.mark.skipif(not pass_peak.PEAK.exists(), reason="this system does not tell such a peak")
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="glibc's heap is measured")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "num_new", "mode"),
    [("grouped", 15, "exact"), ("grouped", 1500, "inexact"), ("latent", 1500, "inexact")],
)
def test_a_pass_behind_a_known_prefix_takes_no_more_than_was_estimated(name, num_new, mode, dtype):
    command = [sys.executable, "-m", pass_peak.__name__, name, str(num_new), mode, dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["taken"] <= found["estimated"] + found["kept"] + ELSEWHERE_BYTES
    assert found["taken"] > found["estimated"] / 4, "else it is no test"
