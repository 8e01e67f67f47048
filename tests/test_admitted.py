"""The versions that `make test-oldest` and `make test-newest` ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.admitted import constraints

ROOT = Path(__file__).resolve().parents[1]


def test_what_runs_for_a_user_is_oldest_or_free_and_tools_keep_their_pins():
    project = """
dependencies = [
    "torch>=2.8",
    "transformers>=5.17,<5.25",
]
serve = [
    "huggingface_hub>=1.5",
]
dev = [
    "huggingface_hub>=1.5",
    "pytest>=8.3",
    "triton>=3.4; platform_system == 'Linux'",
]
"""
    pins = "pytest==9.2.0\nstarlette==1.0\ntorch==2.13.0\ntriton==3.7.1\n"
    found = list(constraints("oldest", project, pins))
    assert found == ["torch==2.8", "transformers==5.17", "huggingface-hub==1.5", "pytest==9.2.0"]
    assert list(constraints("newest", project, pins)) == ["pytest==9.2.0"]


@pytest.mark.parametrize("name", ["torch==", "numpy==", "fastapi==", "hypothesis=="])
def test_the_lists_of_the_project_are_found(name):
    texts = [(ROOT / file).read_text() for file in ("pyproject.toml", "constraints.txt")]
    assert any(line.startswith(name) for line in constraints("oldest", *texts))
