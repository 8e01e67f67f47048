"""A model of a hub is planned from its config and headers; no weights are downloaded."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from moe_infinity.errors import CheckpointError, DownloadError
from moe_infinity.tools.planning.fit import sizes_of
from moe_infinity.tools.planning.remote import hollow_copy
from tests.fake_hub import FakeHub

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with FakeHub() as found:
        found.used_here(monkeypatch, tmp_path / "cache")
        yield found


def ranges(hub, suffix):
    """Of all downloads of files with this suffix."""
    gets = [r for r in hub.requests if r.method == "GET" and r.path.endswith(suffix)]
    return [request.range for request in gets]


def test_a_model_of_the_hub_has_the_sizes_of_the_folder_it_was_made_of(hub, hollow_checkpoint):
    hub.add("some/model", hollow_checkpoint)
    local = sizes_of(str(hollow_checkpoint))
    assert sizes_of("some/model") == replace(local, model="some/model", folder=None)


def test_of_weights_only_headers_are_asked_for_and_nothing_stays(hub, hollow_checkpoint, tmp_path):
    hub.add("some/model", hollow_checkpoint)
    with hollow_copy("some/model") as folder:
        assert folder.exists()
    assert not folder.exists()
    assert not (tmp_path / "cache").exists()
    assert ranges(hub, ".safetensors") == ["bytes=0-100000"]


def test_all_shards_of_an_index_are_described(hub, sharded_checkpoint):
    hub.add("some/model", sharded_checkpoint)
    local = sizes_of(str(sharded_checkpoint))
    assert sizes_of("some/model") == replace(local, model="some/model", folder=None)


def test_a_gguf_file_of_the_hub_is_read_as_far_as_its_header(hub, gguf_file, tmp_path):
    folder = tmp_path / "repo"
    folder.mkdir()
    shutil.copy(gguf_file, folder / "model.gguf")
    hub.add("some/gguf", folder)
    found = sizes_of("some/gguf")
    local = sizes_of(str(gguf_file))
    assert replace(found, model="", folder=None) == replace(local, model="", folder=None)


def test_a_config_beside_gguf_files_makes_no_other_model_of_them(hub, gguf_file, tmp_path):
    """Who quantizes a model may publish its config, too."""
    folder = tmp_path / "with config"
    folder.mkdir()
    shutil.copy(gguf_file, folder / "model.gguf")
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}', "utf-8")
    hub.add("some/gguf", folder)
    assert sizes_of("some/gguf").num_experts == sizes_of(str(gguf_file)).num_experts


def test_of_several_gguf_files_one_has_to_be_named(hub, gguf_file, tmp_path):
    folder = tmp_path / "repo"
    folder.mkdir()
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(gguf_file, folder / name)
    hub.add("some/gguf", folder)
    with pytest.raises(CheckpointError, match=r"name one of them; there are:\n  some/gguf/a.gguf"):
        sizes_of("some/gguf")
    assert sizes_of("some/gguf/b.gguf").num_experts > 0
    with pytest.raises(CheckpointError, match=r"no c.gguf; there are"):
        sizes_of("some/gguf/c.gguf")


def test_a_split_gguf_file_without_all_its_parts_is_an_error(hub, gguf_file, tmp_path):
    folder = tmp_path / "repo"
    folder.mkdir()
    shutil.copy(gguf_file, folder / "model-00001-of-00002.gguf")
    hub.add("some/gguf", folder)
    with pytest.raises(CheckpointError, match=r"lacks its part model-00002-of-00002\.gguf"):
        sizes_of("some/gguf")


def test_a_model_that_nobody_has_is_an_error(hub):
    with pytest.raises(DownloadError, match=r"has no such model.*\nhint: check"):
        sizes_of("some/model")


def test_a_gated_model_is_an_error_that_says_how_to_get_access(hub, hollow_checkpoint):
    hub.add("some/model", hollow_checkpoint)
    hub.faults.gated.add("some/model")
    with pytest.raises(DownloadError, match=r"accept their terms\nhint: accept them at"):
        sizes_of("some/model")


def test_without_network_the_error_says_so(hub):
    hub.close()
    with pytest.raises(
        DownloadError, match=r"no answer from .*\nhint: check the network; try again, or name a fol"
    ):
        sizes_of("some/model")


def test_a_user_who_forbids_the_network_is_told_so():
    """As all tests do, see tests/conftest.py."""
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):
        sizes_of("some/model")


def test_weights_of_which_no_header_can_be_read_are_an_error(hub, hollow_checkpoint, tmp_path):
    folder = tmp_path / "repo"
    folder.mkdir()
    shutil.copy(hollow_checkpoint / "config.json", folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    hub.add("some/model", folder)
    with pytest.raises(CheckpointError, match="no safetensors or GGUF file"):
        sizes_of("some/model")


def test_a_header_that_is_none_is_an_error(hub, hollow_checkpoint, tmp_path):
    folder = tmp_path / "repo"
    folder.mkdir()
    shutil.copy(hollow_checkpoint / "config.json", folder)
    (folder / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"not JSON")
    hub.add("some/model", folder)
    with pytest.raises(CheckpointError, match="model.safetensors: no safetensors file"):
        sizes_of("some/model")


def test_a_path_that_is_not_there_is_never_looked_for_on_the_hub(hub, tmp_path):
    with pytest.raises(CheckpointError):
        sizes_of(str(tmp_path / "absent"))
    assert hub.requests == []


def test_what_tools_write_beside_the_config_is_downloaded(hub, copy_of, hollow_checkpoint):
    folder = copy_of(hollow_checkpoint)
    (folder / "quantize_config.json").write_text('{"bits": 4}')
    hub.add("some/model", folder)
    with hollow_copy("some/model") as found:
        assert (found / "quantize_config.json").read_text() == '{"bits": 4}'
