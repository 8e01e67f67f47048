"""What is downloaded of a model: only what the library reads, only what is missing; and whatever
goes wrong is said in words that help."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import huggingface_hub.constants
import pytest

import moe_infinity.cli.hub
from moe_infinity.cli.hub import Download, find_download
from moe_infinity.errors import ConfigError, DownloadError, UnsupportedModelError
from moe_infinity.local import find_local
from tests.fake_hub import FakeHub

pytestmark = pytest.mark.timeout(60)
CHUNK = 1 << 16
SMALL = {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"}
INDEX = '{"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}'
NEVER_READ = (
    "README.md", "LICENSE", ".gitattributes", "original/consolidated.00.pth", "onnx/model.onnx",
    "original/params.json", "consolidated.safetensors", "tf_model.h5", "figures/plot.png",
)  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with FakeHub() as hub:
        hub.used_here(monkeypatch, tmp_path / "cache")
        monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
        yield hub


@pytest.fixture
def repo(hub: FakeHub, tmp_path: Path) -> Callable[..., Path]:
    """repo(name, ...) -> a folder on the hub as some/model that has these files, and the small
    ones."""

    def make(*names: str, num_bytes: int = 10, **texts: str) -> Path:
        folder = tmp_path / "repo"
        for name in (*SMALL, *names):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(os.urandom(num_bytes))
        for name, text in texts.items():
            (folder / name).write_text(text)
        hub.add("some/model", folder)
        return folder

    return make


def names_of(download: Download) -> set[str]:
    return {file.name for file in download.files}


@pytest.mark.parametrize(
    ("there", "weights"),
    [
        (["model.safetensors", "pytorch_model.bin", "q8.gguf"], ["model.safetensors"]),
        (["pytorch_model.bin", "q8.gguf", "q4.gguf"], ["pytorch_model.bin"]),
        (["q8.gguf", "mmproj-f16.gguf", "imatrix.gguf"], ["q8.gguf"]),
        (
            ["Q8/m-00001-of-00002.gguf", "Q8/m-00002-of-00002.gguf"],
            ["Q8/m-00001-of-00002.gguf", "Q8/m-00002-of-00002.gguf"],
        ),
    ],
    ids=["safetensors first", "then bin", "then the only GGUF", "in all its parts"],
)
def test_only_what_the_library_reads_is_chosen(repo, there, weights):
    repo(*there, *NEVER_READ)
    assert names_of(find_download("some/model")) == SMALL | set(weights)


def test_shards_are_those_that_the_index_names(repo):
    index = "model.safetensors.index.json"
    repo("one.safetensors", "two.safetensors", "three.safetensors", **{index: INDEX})
    chosen = names_of(find_download("some/model"))
    assert chosen == {*SMALL, index, "one.safetensors", "two.safetensors"}


def test_include_chooses_other_weights_and_config_comes_along(repo):
    repo("model.safetensors", "m-Q4_K_M.gguf", "m-Q8_0.gguf")
    download = find_download("some/model", include=["*Q4_K_M*"])
    assert names_of(download) == {*SMALL, "m-Q4_K_M.gguf"}


def test_an_include_that_fits_nothing_is_refused_with_what_there_is(repo):
    repo("m-Q4_K_M.gguf", "m-Q8_0.gguf")
    with pytest.raises(ConfigError, match=r"no file fits \*Q5\*; there are:\n.*10 bytes  m-Q4_K_M"):
        find_download("some/model", include=["*Q5*"])


def test_of_several_ggufs_none_is_guessed(repo):
    repo("m-Q8_0.gguf", "Q4/m-00001-of-00002.gguf", "Q4/m-00002-of-00002.gguf")
    with pytest.raises(ConfigError, match="several GGUF models") as caught:
        find_download("some/model")
    assert " 20 bytes  Q4/m-00001-of-00002.gguf\n" in str(caught.value)
    assert " 10 bytes  m-Q8_0.gguf\n" in str(caught.value)


def test_a_repo_without_weights_is_refused(repo):
    repo(*NEVER_READ)
    with pytest.raises(UnsupportedModelError, match="no weights that this library reads"):
        find_download("some/model")


def test_a_download_has_the_files_of_the_repo(repo):
    folder = repo("model.safetensors", num_bytes=300_000)
    seen: list[tuple[int, int]] = []
    download = find_download("some/model")
    came = download.run(lambda here, total: seen.append((here, total)))
    assert {path.name for path in came.iterdir()} == names_of(download)
    assert all((came / name).read_bytes() == (folder / name).read_bytes()
               for name in names_of(download))  # fmt: skip
    assert seen == sorted(seen)
    assert seen[0] == (0, download.num_bytes)
    assert seen[-1] == (download.num_bytes, download.num_bytes)
    assert find_local("some/model") == str(came)


def test_what_is_here_is_not_downloaded_again(repo, hub):
    repo("model.safetensors")
    find_download("some/model").run()
    download = find_download("some/model")
    assert download.bytes_here() == download.num_bytes
    hub.requests.clear()
    download.run()
    assert not any("/resolve/" in request.path for request in hub.requests)


def test_an_interrupted_download_keeps_the_files_that_are_whole(repo, hub):
    folder = repo("model.safetensors")
    (folder / "model.safetensors").write_bytes(os.urandom(10 * CHUNK))
    hub.faults.cut_at = 4 * CHUNK
    hub.faults.resumes = Event()
    download = find_download("some/model")
    whole = download.num_bytes - 10 * CHUNK

    def press_ctrl_c(here: int, total: int) -> None:
        if download.bytes_here() == whole and here > whole:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download.run(press_ctrl_c)
    assert find_local("some/model") is None
    assert download.bytes_here() == whole
    hub.faults.resumes.set()
    hub.requests.clear()
    came = download.run()
    assert [name for name in names_of(download) if hub.bytes_asked(name)] == ["model.safetensors"]
    for name in names_of(download):
        assert (came / name).read_bytes() == (folder / name).read_bytes()


def test_a_connection_that_breaks_is_made_again(repo, hub):
    folder = repo("model.safetensors")
    (folder / "model.safetensors").write_bytes(os.urandom(10 * CHUNK))
    hub.faults.cut_at = 4 * CHUNK
    find_download("some/model").run()
    ranges = [f"bytes={4 * CHUNK}-", f"bytes={8 * CHUNK}-"]
    assert hub.bytes_asked("model.safetensors") == [None, *ranges]


def test_two_processes_at_once_download_a_file_once(repo, hub, tmp_path):
    repo("model.safetensors", num_bytes=10 * CHUNK)
    hub.faults.cut_at = CHUNK
    hub.faults.num_cuts = 1
    hub.faults.resumes = Event()
    code = "from moe_infinity.cli.hub import find_download; find_download('some/model').run()"
    command = [sys.executable, "-c", code]
    environment = hub.environment(tmp_path / "both")
    with (
        subprocess.Popen(command, env=environment) as one,
        subprocess.Popen(command, env=environment) as other,
    ):
        while sum(request.path == "/api/models/some/model" for request in hub.requests) < 2:
            assert one.poll() is None
            assert other.poll() is None
        hub.faults.resumes.set()
    assert (one.returncode, other.returncode) == (0, 0)
    assert hub.bytes_asked("model.safetensors") == [None]


def test_a_disk_without_room_is_said_before(repo, hub, tmp_path, monkeypatch):
    repo("model.safetensors", num_bytes=2000)
    download = find_download("some/model")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DownloadError) as caught:
        download.run()
    needed = download.num_bytes
    assert f"{tmp_path / 'cache'} has 1.0 kB free" in str(caught.value)
    assert f"{(needed - 1000) / 1000:.1f} kB too little" in str(caught.value)
    assert hub.bytes_asked("model.safetensors") == []


def test_a_disk_that_becomes_full_is_named(repo, monkeypatch):
    def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    repo("model.safetensors", num_bytes=1000)
    monkeypatch.setattr(moe_infinity.cli.hub, "hf_hub_download", refuse)
    with pytest.raises(
        DownloadError, match="the disk is full\nhint: make room; the same command goes on"
    ):
        find_download("some/model").run()


def test_a_folder_that_cannot_be_written_is_named(repo, tmp_path, monkeypatch):
    repo("model.safetensors")
    (tmp_path / "file").touch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    with pytest.raises(DownloadError, match=r"/file/hub.* cannot be written: .*\nhint: set HF_HUB"):
        find_download("some/model").run()


def gated(hub: FakeHub) -> None:
    hub.faults.gated.add("some/model")


def broken(hub: FakeHub) -> None:
    hub.faults.status = 500


@pytest.mark.parametrize(
    ("what", "model", "revision", "said"),
    [
        (gated, "some/model", None, r"accept their terms\nhint: accept them at http.*/some/model"),
        (None, "some/nothing", None, r"has no such model, or not for you\nhint: check the spell"),
        (None, "some/model", "v9", r"has no revision v9\nhint: .*/some/model/tree/main"),
        (broken, "some/model", None, r"answered 500\nhint: the same command goes on"),
        (FakeHub.close, "some/model", None, r"no answer from http.*\nhint: .* the same command"),
    ],
    ids=["gated", "not found", "no such revision", "broken", "no network"],
)
def test_a_hub_that_does_not_give_is_a_clear_error(repo, hub, what, model, revision, said):
    repo("model.safetensors")
    if what is not None:
        what(hub)
    with pytest.raises(DownloadError, match=said):
        find_download(model, revision=revision)


def test_a_wrong_id_is_a_clear_error(hub):
    with pytest.raises(ConfigError, match="'a/b/c' is no id of a model, such as"):
        find_download("a/b/c")


def test_a_file_that_the_hub_lists_and_does_not_give_is_a_clear_error(repo, hub):
    repo("model.safetensors")
    hub.faults.hidden.add("model.safetensors")
    with pytest.raises(DownloadError, match="answered 404"):
        find_download("some/model").run()


def test_offline_nothing_is_asked_and_the_variable_is_named(repo, hub, monkeypatch):
    repo("model.safetensors")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match=r"HF_HUB_OFFLINE is set\nhint: unset it"):
        find_download("some/model")
    assert hub.requests == []


def test_of_a_hub_id_the_only_gguf_that_is_here_is_opened(repo):
    repo("m-Q4.gguf", "m-Q8.gguf")
    download = find_download("some/model", include=["*Q4*"])
    came = download.run()
    assert find_local("some/model") == str(came / "m-Q4.gguf")
