"""Files that change under a running server: status 500, one line, and right answers again once the
files are right."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from moe_infinity import CheckpointError, MoE
from moe_infinity.memory.slots import HostSlots
from tests.server.conftest import DEMO
from tests.server.serving import Serving, serving

SAID = {"prompt": "The old house stood", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def expected() -> str:
    with MoE(DEMO, host_memory="25%") as moe, serving(moe) as server:
        return answer(server).json()["choices"][0]["text"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model")) / "model.safetensors"


@pytest.fixture
def server(file: Path) -> Iterator[Serving]:
    with MoE(file.parent, host_memory="25%") as moe, serving(moe) as server:
        yield server


def answer(server: Serving) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=SAID, timeout=60)


def test_a_file_overwritten_with_garbage_is_500_until_it_is_right_again(
    file, server, expected, caplog
):
    whole = file.read_bytes()
    with file.open("r+b") as opened:
        opened.seek(len(whole) // 4)
        opened.write(bytes(len(whole) // 2))
    for _ in range(2):
        caplog.clear()
        failed = answer(server)
        assert failed.status_code == 500
        assert "was changed (the server's log names it)" in failed.json()["error"]["message"]
        assert str(file) not in failed.text
        (line,) = [text for text in caplog.messages if "a request failed" in text]
        assert f"{file}: was changed while in use: it holds other bytes than before" in line
    file.write_bytes(whole)
    assert answer(server).json()["choices"][0]["text"] == expected


def fill_with_no_number(server: Serving) -> None:
    slots = server.moe.engine.tiers[0].slots
    assert isinstance(slots, HostSlots)
    for slot_id in range(slots.num_slots):
        slot = slots.tensor_of(slot_id, slots.slot_bytes)
        slot.view(torch.bfloat16).fill_(float("nan"))


def test_what_is_no_number_has_no_logprobs(server, expected):
    assert answer(server).json()["choices"][0]["text"] == expected
    fill_with_no_number(server)
    scored = {"prompt": SAID["prompt"], "echo": True, "logprobs": 1, "max_tokens": 0}
    url = f"{server.url}/v1/completions"
    assert [httpx.post(url, json=scored).status_code for _ in range(2)] == [500, 200]


def test_what_is_no_number_is_kept_in_no_file(server, expected, tmp_path):
    assert answer(server).json()["choices"][0]["text"] == expected
    fill_with_no_number(server)
    prefix = tmp_path / "a.prefix"
    with pytest.raises(CheckpointError, match="no number"):
        server.moe.save_prefix(prefix, SAID["prompt"])
    assert not prefix.exists()
    server.moe.save_prefix(prefix, SAID["prompt"])


def test_what_is_no_number_is_500_and_all_experts_are_read_anew(server, expected, caplog):
    assert answer(server).json()["choices"][0]["text"] == expected
    fill_with_no_number(server)
    failed = answer(server)
    assert failed.status_code == 500
    assert "the model computed what is no number" in caplog.text
    assert answer(server).json()["choices"][0]["text"] == expected
