"""The hub of the tests answers as huggingface_hub expects."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import GatedRepoError, HTTPError, RevisionNotFoundError

from tests.fake_hub import FakeHub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    (folder / "sub" / "notes.txt").write_text("text")
    return folder


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.add("some/model", folder)
        hub.used_here(monkeypatch, tmp_path / "cache")
        yield hub


def test_a_snapshot_is_the_folder(hub: FakeHub, folder: Path) -> None:
    snapshot = Path(snapshot_download("some/model"))
    names = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert names == {p.relative_to(snapshot) for p in snapshot.rglob("*") if p.is_file()}
    assert all((snapshot / name).read_bytes() == (folder / name).read_bytes() for name in names)


def test_files_are_listed_with_sizes_and_hashes(hub: FakeHub) -> None:
    listed = HfApi().model_info("some/model", files_metadata=True).siblings
    assert listed is not None
    files = {file.rfilename: file for file in listed}
    assert files["config.json"].size == 2
    assert files["config.json"].lfs is None
    assert files["model.safetensors"].lfs is not None
    assert files["model.safetensors"].lfs.size == 256_000


def test_another_process_uses_it(hub: FakeHub, folder: Path, tmp_path: Path) -> None:
    code = "import huggingface_hub as h; print(h.hf_hub_download('some/model', 'config.json'))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=hub.environment(tmp_path / "other"), text=True,
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert Path(done.stdout.strip()).read_text() == "{}"


def test_a_range_is_a_part(hub: FakeHub) -> None:
    url = f"{hub.endpoint}/some/model/resolve/main/model.safetensors"
    part = httpx.get(url, headers={"Range": "bytes=250-259"})
    assert part.status_code == 206
    assert part.content == bytes([250, 251, 252, 253, 254, 255, 0, 1, 2, 3])
    assert part.headers["Content-Range"] == "bytes 250-259/256000"


def test_a_cut_download_ends_early(hub: FakeHub) -> None:
    hub.faults.cut_at = 1000
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{hub.endpoint}/some/model/resolve/main/model.safetensors")


def test_refusals_are_those_of_a_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RevisionNotFoundError):
        HfApi().model_info("some/model", revision="absent")
    hub.faults.gated.add("some/model")
    with pytest.raises(GatedRepoError):
        HfApi().model_info("some/model")


def test_a_closed_hub_refuses_connections(hub: FakeHub) -> None:
    hub.close()
    with pytest.raises(HTTPError, match="refused"):
        HfApi().model_info("some/model")
