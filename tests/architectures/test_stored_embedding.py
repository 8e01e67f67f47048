"""Embeddings whose rows are looked up in the checkpoint's file."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_infinity import MoE
from moe_infinity.architectures.model_parts import PackedLinear
from moe_infinity.architectures.stored_embedding import StoredEmbedding
from moe_infinity.checkpoint import row_tables
from moe_infinity.engine import device
from moe_infinity.errors import CheckpointError
from tests.gguf_files import build
from tests.gguf_models import WIDE
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import tiny_model
from tools.convert_to_gguf import convert

IDS = torch.tensor([[3, 17, 5, 9, 40, 2, 77, 31, 3, 3]])


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small a table is, it stays in its file."""
    monkeypatch.setattr(device, "TABLE_SHARE", 1 << 60)
    monkeypatch.setattr(row_tables, "LEAST_PACKED_BYTES", 0)


def logits(moe: MoE, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = moe.model(ids).logits
        return found


@pytest.mark.parametrize("options", [{}, {"exact": True}, {"dtype": "float32"}])
def test_logits_are_those_of_the_table_in_memory(tiny_checkpoint, monkeypatch, options):
    with MoE(tiny_checkpoint, **options) as moe:
        expected = logits(moe)
        assert type(moe.model.get_input_embeddings()) is nn.Embedding
    monkeypatch.setattr(device, "TABLE_SHARE", 1 << 60)
    with MoE(tiny_checkpoint, **options) as moe:
        assert isinstance(moe.model.get_input_embeddings(), StoredEmbedding)
        for _ in range(2):  # the second time rows are kept
            assert torch.equal(logits(moe), expected)
        assert "read by row" in str(moe.report())


@pytest.mark.parametrize("folder", ["gemma4", "deepseek_v2", "gpt_oss", "lfm2_moe", "qwen3_next"])
def test_scaled_and_tied_ones_stay_right(folder, tmp_path, looked_up, monkeypatch):
    tiny_model(architectures_in(folder)[-1]).save_pretrained(tmp_path)
    with MoE(tmp_path, dtype="float32") as moe:
        found = logits(moe)
        stored = [m for m in moe.model.modules() if isinstance(m, StoredEmbedding)]
        is_tied = moe.model.config.get_text_config().tie_word_embeddings
        assert bool(stored) or is_tied
    monkeypatch.undo()
    with MoE(tmp_path, dtype="float32") as moe:
        assert torch.equal(logits(moe), found)


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m", "f16"])
def test_packed_rows_of_a_gguf_file(kind, tmp_path, looked_up, monkeypatch):
    file = tmp_path / "model.gguf"
    convert(build("qwen3_moe", tmp_path / "checkpoint", **WIDE), file, kind)
    with MoE(file, dtype="float32") as moe:
        found = logits(moe)
        assert isinstance(moe.model.get_input_embeddings(), StoredEmbedding)
    monkeypatch.undo()
    with MoE(file, dtype="float32") as moe:
        assert not isinstance(moe.model.get_input_embeddings(), StoredEmbedding)
        assert torch.equal(logits(moe), found)


@pytest.mark.arithmetic
@pytest.mark.parametrize("name", ["qwen3_moe", "gemma4_text", "lfm2_moe"])
def test_a_packed_table_that_the_last_layer_multiplies_with(name, tmp_path, looked_up, monkeypatch):
    """It stays packed in memory for the layer, and in its file for the embedding."""
    file = tmp_path / "model.gguf"
    wide = WIDE | {"tie_word_embeddings": True}
    convert(build(name, tmp_path / "checkpoint", **wide), file, "q8_0")
    monkeypatch.setattr(row_tables, "LEAST_PACKED_BYTES", 1 << 60)
    with MoE(file, dtype="float32") as moe:
        expected = logits(moe)
        tokens = moe.generate(input_ids=IDS, max_new_tokens=6)
        head = moe.model.get_output_embeddings()
        assert head.weight is moe.model.get_input_embeddings().weight
        whole = head.weight.clone()
        table_bytes = whole.nbytes
        plain_bytes = moe.report().dense_types["float32"]
    monkeypatch.setattr(row_tables, "LEAST_PACKED_BYTES", 0)
    with MoE(file, dtype="float32") as moe:
        head = moe.model.get_output_embeddings()
        assert isinstance(head, PackedLinear)
        assert isinstance(moe.model.get_input_embeddings(), StoredEmbedding)
        assert torch.equal(head.weight.clone(), whole)
        assert torch.equal(moe.model.get_input_embeddings().weight.clone(), whole)
        assert moe.report().dense_types["float32"] == plain_bytes - table_bytes
        assert (logits(moe) - expected).abs().max() < 2e-5 * expected.abs().max()
        assert torch.equal(moe.generate(input_ids=IDS, max_new_tokens=6), tokens)
        moe.model.tie_weights()
        assert torch.equal(moe.generate(input_ids=IDS, max_new_tokens=6), tokens)
    with MoE(file, dtype="float32", exact=True) as moe:  # multiplies with the weight unpacked
        assert moe.model.get_output_embeddings().weight is moe.model.get_input_embeddings().weight
        assert not isinstance(moe.model.get_input_embeddings(), StoredEmbedding)


def test_progress_counts_a_tied_table_once(tmp_path, looked_up):
    file = tmp_path / "model.gguf"
    wide = WIDE | {"tie_word_embeddings": True}
    convert(build("qwen3_moe", tmp_path / "checkpoint", **wide), file, "q8_0")
    seen: list[tuple[int, int]] = []
    with MoE(file, on_bytes=lambda *now: seen.append(now)):
        assert max(seen) == (seen[0][1], seen[0][1])


@pytest.mark.parametrize("kind", ["q8_0", "f16"])
def test_the_table_of_n_grams_of_a_gguf_file(kind, tmp_path, looked_up, monkeypatch):
    """Whose rows the hash finds that the file's metadata describe."""
    file = tmp_path / "model.gguf"
    wide = WIDE | {"ple_embed_dim": 128}  # rows of 32
    convert(build("qwen4_exp_text", tmp_path / "checkpoint", **wide), file, kind)
    with MoE(file, dtype="float32") as moe:
        found = logits(moe)
        table = moe.model.model.layers[1].ple.ple_embedding.ngram_embedding
        assert isinstance(table, StoredEmbedding)
    monkeypatch.undo()
    with MoE(file, dtype="float32") as moe:
        table = moe.model.model.layers[1].ple.ple_embedding.ngram_embedding
        assert not isinstance(table, StoredEmbedding)
        assert torch.equal(logits(moe), found)


def test_a_small_table_is_loaded(tiny_checkpoint):
    with MoE(tiny_checkpoint) as moe:
        assert not isinstance(moe.model.get_input_embeddings(), StoredEmbedding)


def test_the_weight_is_there_for_other_readers(tiny_checkpoint, looked_up, monkeypatch):
    with MoE(tiny_checkpoint) as moe:
        weight: Any = moe.model.get_input_embeddings().weight
        assert (weight.shape, weight.dtype) == ((128, 32), torch.bfloat16)
        assert weight.device.type == "cpu"
        found = weight[3] + weight.float().sum()
        rows = torch.nn.functional.embedding(IDS, weight)
        tokens = moe.generate(input_ids=IDS, max_new_tokens=6)
        monkeypatch.undo()
        with MoE(tiny_checkpoint) as loaded:
            whole = loaded.model.get_input_embeddings().weight
            assert torch.equal(found, whole[3] + whole.float().sum())
            assert torch.equal(rows, torch.nn.functional.embedding(IDS, whole))
            assert torch.equal(weight.clone(), whole)
            assert torch.equal(loaded.generate(input_ids=IDS, max_new_tokens=6), tokens)


@pytest.mark.parametrize(
    "change",
    [lambda w: w.mul_(2), lambda w: w.data.mul_(2), lambda w: w.__setitem__(0, 1.0),
     lambda w: w.detach().copy_(w), lambda w: torch.mul(w, 2, out=w),
     lambda w: setattr(w, "data", w * 2)],
)  # fmt: skip
def test_a_change_of_the_weight_is_refused(tiny_checkpoint, looked_up, change):
    with (
        MoE(tiny_checkpoint) as moe,
        torch.no_grad(),
        pytest.raises(RuntimeError, match="cannot be changed\nhint: put a module of torch"),
    ):
        change(moe.model.get_input_embeddings().weight)


def test_another_weight_is_refused(tiny_checkpoint, looked_up):
    with MoE(tiny_checkpoint) as moe:
        embedding = moe.model.get_input_embeddings()
        with pytest.raises(RuntimeError, match="cannot be changed"):
            embedding.weight = nn.Parameter(embedding.weight.clone())


def test_the_embedding_can_be_replaced_and_cast(tiny_checkpoint, looked_up):
    with MoE(tiny_checkpoint) as moe:
        expected = logits(moe)
        moe.model.get_input_embeddings().float()
        assert moe.model.get_input_embeddings()(IDS).dtype == torch.float32
        moe.model.get_input_embeddings().bfloat16()
        whole = moe.model.get_input_embeddings().weight.clone()
        moe.model.set_input_embeddings(nn.Embedding.from_pretrained(whole))
        assert torch.equal(logits(moe), expected)


def test_rows_that_are_not_there(tiny_checkpoint, looked_up):
    with MoE(tiny_checkpoint) as moe:
        embedding = moe.model.get_input_embeddings()
        with pytest.raises(IndexError, match="rows 3 to 128 of a table of 128"):
            embedding(torch.tensor([3, 128]))
        assert embedding(torch.empty(1, 0, dtype=torch.long)).shape == (1, 0, 32)


def test_a_file_that_lost_its_end(tiny_checkpoint, tmp_path, looked_up):
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, folder)
    with MoE(folder, preload="off") as moe:
        (file,) = folder.glob("*.safetensors")
        with file.open("r+b") as opened:
            opened.truncate(100)
        with pytest.raises(CheckpointError, match=Path(file).name):
            moe.model.get_input_embeddings()(IDS)


def test_few_rows_are_kept(tiny_checkpoint, looked_up, monkeypatch):
    monkeypatch.setattr(row_tables, "KEPT_BYTES", 3 * 64)
    with MoE(tiny_checkpoint) as moe:
        embedding = moe.model.get_input_embeddings()
        expected = embedding.weight.clone()
        for ids in torch.randint(0, 128, (50, 7), generator=torch.Generator().manual_seed(0)):
            assert torch.equal(embedding(ids), expected[ids])
            assert len(embedding.rows._kept) <= 3


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * self.weight.shape[1] ** 0.5


class ReadsAll(nn.Embedding):
    def forward(self, input):
        return nn.functional.embedding(input, self.weight - self.weight.mean())


def test_a_class_that_needs_the_whole_weight_keeps_it():
    with torch.device("meta"):
        assert StoredEmbedding.can_take_over(nn.Embedding(8, 4))
        assert StoredEmbedding.can_take_over(Scaled(8, 4))
        assert not StoredEmbedding.can_take_over(ReadsAll(8, 4))
        assert not StoredEmbedding.can_take_over(nn.Embedding(8, 4, max_norm=1.0))


def test_a_copy_of_the_module_looks_up_the_same_rows(tiny_checkpoint, looked_up):
    with MoE(tiny_checkpoint) as moe:
        embedding = moe.model.get_input_embeddings()
        assert torch.equal(copy.deepcopy(embedding)(IDS), embedding(IDS))


def test_a_history_fits_wherever_the_table_is(tiny_checkpoint, tmp_path, monkeypatch):
    """Which depends on the memory."""
    history = str(tmp_path / "history.npz")
    with MoE(tiny_checkpoint, history=history) as moe:
        moe.generate(input_ids=IDS, max_new_tokens=4)
    monkeypatch.setattr(device, "TABLE_SHARE", 1 << 60)
    with MoE(tiny_checkpoint, history=history) as moe:
        assert isinstance(moe.model.get_input_embeddings(), StoredEmbedding)
        moe.generate(input_ids=IDS, max_new_tokens=4)
