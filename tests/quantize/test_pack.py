"""What `moe-infinity pack` writes is a checkpoint with the same model in fewer bits: experts are
rounded as told, everything else is the same to the byte.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from moe_infinity import CheckpointError, MoE
from moe_infinity.checkpoint.file_names import checkpoint_files
from moe_infinity.checkpoint.headers import Extent, StoredTensor, read_headers
from moe_infinity.cli.inspection import inspect_checkpoint
from moe_infinity.kernels.pack import precision_of
from moe_infinity.quantize.tensors import ChosenTensors, quantization_config
from tests.architectures import encoder_decoders
from tests.compressed_tensors_package import compressor
from tests.quantize.packed_checkpoints import (
    LEFT_OUT,
    everything_in,
    make_source,
    pack,
    plainly_unpacked,
    save_random,
    tensors_of,
)

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(3)]

PRECISIONS = ["int4", "int8", "fp8"]
PROMPT = torch.arange(3, 3 + 26).view(2, 13) * 4 % 128  # two sequences
NUM_WEIGHTS = 3 * 8 * 3  # layers, experts, matrices


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Read-only."""
    return make_source(tmp_path_factory.mktemp("pack") / "source")


@pytest.fixture(scope="module", params=PRECISIONS)
def experts(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(experts, source, tmp_path_factory) -> Path:
    """What is packed of `source`, rounded to nearest. Read-only."""
    folder = tmp_path_factory.mktemp(experts) / "packed"
    pack(source, folder, experts=experts, rounding="nearest")
    return folder


@torch.no_grad()
def prefill_and_generate(model: Any) -> tuple[Tensor, ...]:
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    return model(**inputs).logits, model.generate(**inputs, max_new_tokens=12, do_sample=False)


def check_against_stock(folder: Path, source: Path, plain: Path) -> None:
    """Ours of `folder` against stock with weights unpacked plainly, in the new folder `plain`."""
    shutil.copytree(source, plain)
    save_file(plainly_unpacked(folder), plain / "model.safetensors", {"format": "pt"})
    stock = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype="auto")
    expected = prefill_and_generate(stock)
    for budget in ("5%", "50%", "100%"):
        with MoE(folder, host_memory=budget, experts_implementation="grouped_mm") as moe:
            found = prefill_and_generate(moe.model)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs), budget


# What is written


@pytest.mark.sample(3)
def test_tokens_and_logits_are_those_of_the_plainly_unpacked_weights(folder, source, tmp_path):
    check_against_stock(folder, source, tmp_path / "plain")


def test_experts_are_within_half_a_step_of_what_they_were(folder, experts, source):
    """bfloat16 throughout: what is read is rounded to it, and so is int4's scale."""
    before, after, tensors = tensors_of(source), plainly_unpacked(folder), tensors_of(folder)
    assert before.keys() == after.keys()
    for name, weight in before.items():
        if ".experts." not in name:
            continue
        scales = tensors[f"{name}_scale"].float()
        scales = scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
        steps = scales if experts != "fp8" else scales * 32  # between 256 and 448
        error = (after[name].float() - weight.float()).abs()
        assert bool((error <= steps / 2 + 2.0**-7 * weight.abs()).all()), name


def test_all_but_the_experts_is_the_same_to_the_byte(folder, source):
    before, after = tensors_of(source), tensors_of(folder)
    dense = [name for name in before if ".experts." not in name]
    assert len(dense) > 20
    for name in dense:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)), name


def test_all_files_but_other_weights_are_copied(folder, source):
    found, wanted = everything_in(folder), everything_in(source)
    shards = {name for name in found if name.endswith(".safetensors")}
    left_out = {"model.safetensors", "config.json", *LEFT_OUT}
    new = {"model.safetensors.index.json", "config.json", "SHA256SUMS"}
    assert found.keys() == (wanted.keys() - left_out) | shards | new
    assert all(found[name] == wanted[name] for name in wanted.keys() - left_out)
    config = json.loads(found["config.json"])
    assert config.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert config == json.loads(wanted["config.json"])


def test_the_checksums_are_what_sha256sum_expects(folder):
    subprocess.run(["sha256sum", "-c", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    listed = (folder / "SHA256SUMS").read_text().splitlines()
    assert len(listed) == len(everything_in(folder)) - 1


def test_the_index_tells_where_everything_is(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = checkpoint_files(folder)
    assert len(files) > 2
    places = {name: t.extent.file.name for name, t in read_headers(files).tensors.items()}
    paddings = {name for name in places if name.startswith("padding.")}
    assert index["weight_map"] == {n: at for n, at in places.items() if n not in paddings}


def test_an_expert_lies_in_one_piece_that_begins_at_a_page(folder):
    pieces: dict[str, list[Any]] = {}
    for name, tensor in read_headers(checkpoint_files(folder)).tensors.items():
        if ".experts." in name and not name.endswith("_shape"):
            at = name.partition(".experts.")
            pieces.setdefault(at[0] + at[2].split(".")[0], []).append(tensor.extent)
    assert len(pieces) == 24
    for extents in pieces.values():
        extents.sort(key=lambda extent: extent.offset)
        assert extents[0].offset % 4096 == 0
        assert len(extents) == 6
        for one, next_one in zip(extents, extents[1:], strict=False):
            assert one.file == next_one.file
            assert one.offset + one.num_bytes == next_one.offset


def test_paddings_are_zeros_and_no_part_of_the_model(folder):
    paddings = {n: t for n, t in tensors_of(folder).items() if n.startswith("padding.")}
    assert paddings
    assert not any(padding.any() for padding in paddings.values())
    dense = [t for n, t in tensors_of(folder).items() if ".experts." not in n and n not in paddings]
    summary = inspect_checkpoint(str(folder))
    assert summary.dense_bytes == sum(tensor.nbytes for tensor in dense)


def test_search_has_a_smaller_error_than_nearest(experts, source, tmp_path):
    reports = {
        rounding: pack(source, tmp_path / rounding, experts=experts, rounding=rounding)
        for rounding in ("search", "nearest")
    }
    assert reports["search"].mean_error < reports["nearest"].mean_error
    assert reports["search"].num_weights == NUM_WEIGHTS
    assert reports["search"].worst_error >= reports["search"].mean_error


def test_the_report_tells_the_errors_there_are(experts, source, tmp_path):
    report = pack(source, tmp_path / "out", experts=experts)
    before, after = tensors_of(source), plainly_unpacked(tmp_path / "out")
    errors = {
        name: float((after[name].double() - w.double()).norm() / w.double().norm())
        for name, w in before.items()
        if ".experts." in name
    }
    assert report.worst_error == pytest.approx(max(errors.values()), rel=1e-4)
    assert errors[report.worst_name] == pytest.approx(report.worst_error, rel=1e-4)
    assert report.mean_error == pytest.approx(sum(errors.values()) / len(errors), rel=1e-4)
    assert report.bytes_before == sum(t.nbytes for t in before.values())
    files = (tmp_path / "out").glob("*.safetensors")
    assert report.bytes_after == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize("experts", ["int4", "fp8"])
def test_stock_transformers_computes_the_same(experts, source, tmp_path):
    """int8 is left out: transformers up to 5.17 at least does not unpack it for fused experts."""
    compressor("pack-quantized")
    pack(source, tmp_path / "out", experts=experts)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    expected = prefill_and_generate(stock)
    with MoE(tmp_path / "out", host_memory="50%", experts_implementation="grouped_mm") as moe:
        for ours, theirs in zip(prefill_and_generate(moe.model), expected, strict=True):
            assert torch.equal(ours, theirs)


# Other layouts


@pytest.mark.parametrize("precision", PRECISIONS)
def test_weights_stacked_over_experts_are_packed_stacked(precision, tmp_path):
    sizes = {"num_local_experts": 8, "num_experts_per_tok": 3}
    source = save_random("GraniteMoe", tmp_path / "source", **sizes)
    report = pack(source, tmp_path / "out", experts=precision, rounding="nearest")
    assert report.num_weights == 3 * 8 * 2  # gate and up are one
    tensors = tensors_of(tmp_path / "out")
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    assert tensors[f"{name}_scale"].shape == (8, 192, 2 if precision == "int4" else 1)
    check_against_stock(tmp_path / "out", source, tmp_path / "plain")


@pytest.mark.parametrize("name", encoder_decoders.CONFIGS)
def test_a_checkpoint_in_pickles_becomes_one_in_safetensors(name, tmp_path):
    """With biases, and weights that are tied under several names."""
    (tmp_path / "source").mkdir()
    model = encoder_decoders.make_model(name).to(torch.bfloat16)
    source = encoder_decoders.save_bin(model, tmp_path / "source")
    pack(source, tmp_path / "out", experts="int8")
    before, after = torch.load(source / "pytorch_model.bin"), plainly_unpacked(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        is_packed = ".expert_" in key and tensor.ndim == 2
        assert torch.equal(after[key], tensor) == (not is_packed), key
        assert (after[key].float() - tensor.float()).norm() <= 0.02 * tensor.float().norm()
    with MoE(tmp_path / "out", host_memory="50%") as moe:
        encoder_decoders.forward_and_generate(moe.model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_packed_and_computed_in(dtype, source, tmp_path):
    changed = tmp_path / "source"
    shutil.copytree(source, changed)
    transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(changed)
    report = pack(changed, tmp_path / "out", experts="int8")
    assert report.mean_error < 0.01
    with MoE(tmp_path / "out", host_memory="50%") as moe:
        assert moe.model.dtype == dtype
        moe.generate(PROMPT, max_new_tokens=2, do_sample=False)


# The command


def test_the_command_packs_and_tells_the_errors(command, source, tmp_path):
    outcome = command("pack", source, "--experts", "int4", "--group-size", 64, "-o", tmp_path / "o")
    assert outcome.code == 0
    assert "relative error" in outcome.out
    run = command("run", tmp_path / "o", "-p", "w5 w6", "--max-new-tokens", 4)
    assert len(run.out.split()) == 4


def test_a_link_to_a_file_elsewhere_is_not_followed(source, tmp_path):
    """The packed folder is often published."""
    checkpoint = shutil.copytree(source, tmp_path / "source")
    (tmp_path / "secret").write_text("x")
    (checkpoint / "NOTES.md").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"NOTES.md: a link to .*secret.*\nhint: "):
        pack(checkpoint, tmp_path / "packed", experts="int4", rounding="nearest")


def test_links_in_a_snapshot_of_the_hub_are_files(source, tmp_path):
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0"
    shutil.copytree(source, blobs)
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    pack(snapshot, tmp_path / "packed", experts="int4", rounding="nearest")
    assert (tmp_path / "packed" / "tokenizer.json").is_file()


def test_an_adapter_is_not_left_out(source, tmp_path, monkeypatch):
    monkeypatch.setattr("moe_infinity.untrusted.folder.is_peft_available", lambda: True)
    checkpoint = shutil.copytree(source, tmp_path / "source")
    (checkpoint / "adapter_config.json").write_text('{"r": 8}')
    with pytest.raises(CheckpointError, match="leave the adapter out"):
        pack(checkpoint, tmp_path / "packed", experts="int4", rounding="nearest")


def test_weights_of_packed_names_that_stay_as_they_are_are_left_out_by_name():
    """As those of layers that predict tokens ahead."""

    def weights(layer: int) -> dict[str, StoredTensor]:
        names = [f"model.layers.{layer}.mlp.experts.{at}.up_proj.weight" for at in range(2)]
        extent = Extent(Path("file"), 0, 64)
        return {name: StoredTensor(name, "BF16", (4, 8), extent) for name in names}

    chosen = ChosenTensors({(0, at): {"up": w} for at, w in enumerate(weights(0).values())}, {})
    config = quantization_config(precision_of("int8", 32), chosen, weights(0) | weights(1))
    (target,) = config["config_groups"]["group_0"]["targets"]
    assert target == r"re:model\.layers\.\d+\.mlp\.experts\.\d+\.up_proj$"
    assert config["ignore"] == [f"model.layers.1.mlp.experts.{at}.up_proj" for at in range(2)]
