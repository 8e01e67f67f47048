"""llama.cpp in a process of its own, with a fake llama_cpp: what goes wrong there is said here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from moe_infinity.errors import ConfigError, MoEInfinityError
from moe_infinity.tools.bench.peer import Peer, parse_compare, require_llama_cpp

FAKE = Path(__file__).resolve().parents[1] / "fake_llama"


@pytest.fixture(autouse=True)
def fake_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE))


def peer(file: str) -> Peer:
    return Peer(Path(file), python=sys.executable, num_threads=2, num_positions=64)


def test_a_text_is_timed_as_a_prompt_and_what_is_decoded_after_it():
    running = peer("model.gguf")
    prompt, decoded = running.run([5, 6, 7, 8, 9], num_prompt=3)
    running.close()
    assert running.about == "llama-cpp-python 0, 2 threads; CPU : AVX2 = 1"
    assert (prompt.num_tokens, decoded.num_tokens) == (3, 2)
    assert prompt.seconds > 0 < decoded.seconds


def test_a_file_that_cannot_be_loaded_is_an_error_with_what_llama_cpp_said():
    with pytest.raises(MoEInfinityError, match=r"ended: exit status 1\nno magic\n.*cannot load"):
        peer("bad.gguf")


def test_a_process_that_dies_is_an_error_with_its_exit_status():
    running = peer("dying.gguf")
    with pytest.raises(MoEInfinityError, match="ended: exit status 9"):
        running.run([5, 6], num_prompt=1)
    running.close()


def test_an_interpreter_without_llama_cpp_is_refused_with_a_hint(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(ConfigError, match="cannot import.*llama_cpp'\nhint: pip install"):
        require_llama_cpp(sys.executable)


def test_an_interpreter_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="cannot be run"):
        require_llama_cpp("/no/such/python")


@pytest.mark.parametrize("text", ["model.gguf", "llama.cpp", "llama.cpp:", "ollama:model.gguf"])
def test_what_names_no_peer_is_refused_with_the_form(text):
    with pytest.raises(ConfigError, match=r"hint: --compare llama\.cpp:FILE\.gguf"):
        parse_compare(text)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not a file"):
        parse_compare(f"llama.cpp:{tmp_path / 'missing.gguf'}")
