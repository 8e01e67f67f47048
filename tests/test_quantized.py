"""Quantized checkpoints give the results of stock transformers on the same weights unpacked, and
stay as small as they are stored until an expert is computed.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from moe_infinity import MoE, UnsupportedModelError
from moe_infinity.checkpoint.headers import read_headers
from moe_infinity.cli.inspection import inspect_checkpoint
from tests.on_demand import ON_DEMAND
from tests.quantized_checkpoints import CHECKPOINTS, build, edit_config
from tests.slow_unpack import dequantized

pytestmark = pytest.mark.arithmetic

BUDGETS = ["6.3%", "50%", "100%"]  # of 16 experts: one slot, half of them, all
PROMPT = torch.arange(3, 3 + 26).view(2, 13) * 4 % 128  # two sequences


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request, tmp_path_factory) -> Path:
    return build(request.param, tmp_path_factory.mktemp("quantized") / "model")


@pytest.fixture(scope="module")
def plain(folder) -> Path:
    return dequantized(folder, folder.parent / "plain")


def expert_bytes(folder: Path) -> int:
    """Of one expert of layer 0, as stored. What unpacking does not need is not counted."""
    unneeded = (".weight_shape", ".input_scale", ".input_global_scale")
    total = 0
    for name, tensor in read_headers([folder / "model.safetensors"]).tensors.items():
        if "layers.0.mlp.experts" not in name or name.endswith(unneeded):
            continue
        if ".experts.0." in name:
            total += tensor.extent.num_bytes
        elif not name.split(".experts.")[1][0].isdigit():  # stacked over 8 experts
            total += tensor.extent.num_bytes // 8
    return total


@torch.no_grad()
def prefill_and_generate(model) -> tuple[torch.Tensor, ...]:
    """Logits of every prompt token, 8 greedy tokens, and the logits each was chosen from."""
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    out = model.generate(
        **inputs,
        max_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return model(**inputs).logits, out.sequences, torch.stack(out.logits)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "implementation", ["grouped_mm", pytest.param("eager", marks=pytest.mark.slow)]
)
def test_tokens_and_logits_are_those_of_the_unpacked_model(folder, plain, implementation):
    options = {"dtype": "bfloat16", "experts_implementation": implementation}
    stock = transformers.AutoModelForCausalLM.from_pretrained(plain, **options)
    expected = prefill_and_generate(stock)
    for budget in BUDGETS:
        with MoE(folder, host_memory=budget, **options) as moe:
            found = prefill_and_generate(moe.model)
            moe.check_invariants()
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs), budget


@pytest.mark.sample(3)
def test_an_expert_takes_no_more_memory_than_on_disk(folder):
    summary = inspect_checkpoint(str(folder), dtype="bfloat16")
    assert summary.stored_bytes_per_expert == expert_bytes(folder)
    assert summary.bytes_per_expert == expert_bytes(folder)
    with MoE(folder, host_memory="100%", dtype="bfloat16", **ON_DEMAND) as moe:
        moe.generate(PROMPT, max_new_tokens=2, do_sample=False)
        report = moe.report()
    (host,) = (tier for tier in report.tiers if tier.tier == "host")
    assert host.capacity == 16
    alignment = 64 * 16  # bytes: of up to 16 parts to cache lines
    assert host.capacity_bytes <= 16 * (expert_bytes(folder) + alignment)
    misses = report.prefill.misses + report.decode.misses
    assert report.bytes_read == misses * expert_bytes(folder)


def test_an_unsupported_format_is_refused_with_the_list_of_those_that_are(folder):
    broken = folder.parent / "broken"
    broken.mkdir()
    shutil.copy(folder / "config.json", broken)
    (broken / "model.safetensors").symlink_to(folder / "model.safetensors")
    unknown = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    edit_config(broken, lambda config: config | {"quantization_config": unknown})
    for load in (MoE, inspect_checkpoint):
        with pytest.raises(UnsupportedModelError, match="bitsandbytes") as refused:
            load(str(broken))
        for supported in ("fp8", "mxfp4", "compressed-tensors", "gptq", "awq"):
            assert f"\n{supported} " in str(refused.value)


SAID_BY_TOOLS = {
    "gptq": ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False}),
    "awq": (
        "quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM", "zero_point": True}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAID_BY_TOOLS)
def test_what_older_tools_say_beside_the_config_is_read(name, tmp_path):
    """AutoGPTQ and AutoAWQ, without a quant_method."""
    build(name, tmp_path / "new")
    with MoE(tmp_path / "new", exact=True) as moe, torch.no_grad():
        expected = moe.model(PROMPT).logits
    older = shutil.copytree(tmp_path / "new", tmp_path / "older")
    edit_config(older, lambda config: config | {"quantization_config": None})
    file, content = SAID_BY_TOOLS[name]
    (older / file).write_text(json.dumps(content))
    with MoE(older, exact=True) as moe, torch.no_grad():
        assert torch.equal(moe.model(PROMPT).logits, expected)
