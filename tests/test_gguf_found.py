"""GGUF files in folders and under names that people have."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from moe_infinity import CheckpointError, MoE
from moe_infinity.checkpoint.file_names import find_gguf, gguf_models
from tests.gguf_files import build
from tools.convert_to_gguf import convert

IDS = torch.tensor([[3, 4]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Qwen3-MoE with its GGUF file q8_0.gguf."""
    folder = build("qwen3_moe", tmp_path_factory.mktemp("small"))
    convert(folder, folder / "q8_0.gguf", "q8_0")
    return folder


def test_a_file_beside_a_config_is_the_model_of_the_folder(folder, tmp_path):
    """As repositories of GGUF files are, for the sake of their pages."""
    shutil.copy(folder / "q8_0.gguf", tmp_path / "m.gguf")
    shutil.copy(folder / "config.json", tmp_path)
    with MoE(tmp_path) as moe:
        assert moe.generate(IDS, max_new_tokens=1).shape == (1, 3)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="model.safetensors"):
        MoE(tmp_path)


def test_a_config_is_that_of_its_folder_whatever_lies_beside_it(folder, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(folder / "q8_0.gguf", tmp_path / name)
    shutil.copy(folder / "config.json", tmp_path)
    with MoE(tmp_path / "a.gguf", config_from=str(tmp_path)) as moe:
        assert moe.generate(IDS, max_new_tokens=1).shape == (1, 3)
    with pytest.raises(CheckpointError, match="several GGUF files"):
        MoE(tmp_path)


def test_a_file_is_known_by_how_it_begins(folder, tmp_path):
    """Ollama's have a hash for a name."""
    blob = tmp_path / f"sha256-{64 * '0'}"
    shutil.copy(folder / "q8_0.gguf", blob)
    with MoE(blob) as moe:
        assert moe.generate(IDS, max_new_tokens=1).shape == (1, 3)


def test_parts_that_were_cut_anywhere_are_to_be_joined(tmp_path):
    part = tmp_path / "m.Q8_0.gguf.part1of2"
    part.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"hint: .* cat m.Q8_0.gguf.part\* > m.Q8_0.gguf"):
        MoE(part)


@pytest.mark.parametrize("name", ["mtp-m.gguf", "MTP-m-BF16.gguf"])
def test_a_draft_is_no_second_model(folder, tmp_path, name):
    for each in (name, "M-MTP-Q8_0.gguf"):
        shutil.copy(folder / "q8_0.gguf", tmp_path / each)
    assert find_gguf(str(tmp_path)) == tmp_path / "M-MTP-Q8_0.gguf"
    assert gguf_models(["MTP/m.gguf", "m-mtp/m.gguf", "m.gguf"]) == ["m-mtp/m.gguf", "m.gguf"]


def test_a_file_is_found_one_folder_down(folder, tmp_path):
    """As `hf download ORG/MODEL-GGUF --include "*Q8_0*" --local-dir here` leaves it."""
    (tmp_path / "Q8_0").mkdir()
    shutil.copy(folder / "q8_0.gguf", tmp_path / "Q8_0" / "m.gguf")
    (tmp_path / "mmproj-F16.gguf").touch()
    (tmp_path / "README.md").touch()
    assert find_gguf(str(tmp_path)) == tmp_path / "Q8_0" / "m.gguf"
    with MoE(tmp_path / "Q8_0") as moe:
        assert moe.generate(IDS, max_new_tokens=1).shape == (1, 3)
    shutil.copytree(tmp_path / "Q8_0", tmp_path / "Q4_0")
    with pytest.raises(CheckpointError, match="several GGUF files, name one of them: Q4_0/m.gguf"):
        MoE(tmp_path)
    shutil.copy(folder / "q8_0.gguf", tmp_path / "m.gguf")
    assert find_gguf(str(tmp_path)) == tmp_path / "m.gguf"
