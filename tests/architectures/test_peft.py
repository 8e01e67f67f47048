"""Adapters of PEFT around a loaded model: every step computes what stock computes with them. Needs
the package peft, see CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from moe_infinity import CheckpointError, MoE, UnsupportedModelError
from moe_infinity.architectures.model_parts import PackedLinear, ReorderedLinear
from tests import gguf_files
from tests.architectures.test_decoder_layers import TOKENS, logits_of, saved
from tests.gguf_models import WIDE
from tests.peft_warnings import IGNORED
from tests.quantized_checkpoints import build
from tools.convert_to_gguf import convert

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.arithmetic, *IGNORED]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SHARED = ["shared_expert.gate_proj", "shared_expert.down_proj", "shared_expert_gate"]
ADAPTERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "attention": ("Mixtral", lambda: peft.LoraConfig(target_modules=ATTENTION, **RANDOM)),
    "one of them": ("Mixtral", lambda: peft.LoraConfig(target_modules=["v_proj"], **RANDOM)),
    "sinks": ("GptOss", lambda: peft.LoraConfig(target_modules=["o_proj"], **RANDOM)),
    "shared experts": ("Qwen2Moe", lambda: peft.LoraConfig(target_modules=SHARED, **RANDOM)),
    "router": ("Qwen3Moe", lambda: peft.LoraConfig(target_parameters=["gate.weight"], **RANDOM)),
    "head": ("Olmoe", lambda: peft.LoraConfig(target_modules=["lm_head"], **RANDOM)),
    "dora": ("Mixtral", lambda: peft.LoraConfig(target_modules=ATTENTION, use_dora=True, **RANDOM)),
    "whole router": ("Qwen3Moe", lambda: peft.LoraConfig(modules_to_save=["gate"], **SAVING)),
    "whole norm": ("Mixtral", lambda: peft.LoraConfig(modules_to_save=["norm"], **SAVING)),
    "whole head": ("Olmoe", lambda: peft.LoraConfig(modules_to_save=["lm_head"], **SAVING)),
    "norms": ("Mixtral", lambda: peft.LNTuningConfig(target_modules=["input_layernorm"])),
    "ia3": (
        "Mixtral",
        lambda: peft.IA3Config(
            target_modules=["k_proj", "v_proj"], feedforward_modules=[], init_ia3_weights=False
        ),
    ),
}
RANDOM: dict[str, Any] = {"r": 4, "lora_alpha": 16, "init_lora_weights": False}
SAVING: dict[str, Any] = {"target_modules": ["q_proj"], **RANDOM}


def steps(model: Any) -> Tensor:
    return logits_of(model, TOKENS[:1, :9])


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def adapted(model: Any, config: Any) -> Any:
    torch.manual_seed(0)
    with_adapter = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, param in with_adapter.named_parameters():
            is_as_it_was = ("ln_tuning", "ia3", "modules_to_save")
            if any(each in name for each in is_as_it_was):
                param.mul_(1.5)
    return with_adapter


@pytest.mark.parametrize("host_memory", ["50%", "100%"])
@pytest.mark.parametrize("case", ADAPTERS)
def test_every_step_has_the_adapter(case, host_memory, tmp_path):
    name, config = ADAPTERS[case]
    folder = saved(name, tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    plain = steps(stock)
    stock = adapted(stock, config())
    with MoE(folder, host_memory=host_memory) as moe:
        if host_memory == "100%":
            moe.preload()
        assert_close(steps(moe.model), plain)
        ours = adapted(moe.model, config())
        expected = steps(stock)
        assert (expected - plain).abs().max() > 1e-2 * plain.abs().max()
        assert_close(steps(ours), expected)
        with stock.disable_adapter(), ours.disable_adapter():
            assert_close(steps(ours), plain)
        assert_close(steps(ours), expected)
        if case in ("dora", "router"):
            return  # merging them takes weights apart
        for model in (stock, ours):
            model.merge_adapter()
        assert_close(steps(ours), steps(stock))
        for model in (stock, ours):
            model.unmerge_adapter()
        assert_close(steps(ours), expected)
        merged = ours.merge_and_unload()
        assert_close(steps(merged), expected)


def test_adapters_of_transformers_itself(tmp_path):
    integration = importlib.import_module("transformers.integrations.peft")
    pytest.importorskip("peft", minversion=getattr(integration, "MIN_PEFT_VERSION", "0"))
    folder = saved("Mixtral", tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with MoE(folder, host_memory="50%") as moe:
        for model in (stock, moe.model):
            torch.manual_seed(0)
            model.add_adapter(peft.LoraConfig(target_modules=ATTENTION, **RANDOM))
            model.eval()
        assert_close(steps(moe.model), steps(stock))


@pytest.mark.parametrize("exact", [False, True])
def test_layers_that_stay_packed_take_adapters(exact, tmp_path):
    folder = build("fp8", tmp_path / "model")
    with MoE(folder, exact=exact, dtype="float32") as moe:
        packed = [module for module in moe.model.modules() if isinstance(module, PackedLinear)]
        assert len(packed) > 0 or exact
        plain = steps(moe.model)
        adapter = adapted(moe.model, peft.LoraConfig(target_modules=ATTENTION, **RANDOM))
        names = [name for name, _ in adapter.named_parameters() if "lora_A" in name]
        assert len(names) == len(ATTENTION) * moe.model.config.num_hidden_layers
        found = steps(adapter)
        assert (found - plain).abs().max() > 1e-2 * plain.abs().max()
        with adapter.disable_adapter():
            assert_close(steps(adapter), plain)


def test_layers_of_gguf_files_with_other_columns_take_adapters(tmp_path):
    """The last linear layer of linear attention in Qwen3.5."""
    heads = {"linear_num_value_heads": 8, "linear_num_key_heads": 2, "linear_value_head_dim": 64}
    folder = gguf_files.build("qwen3_5_moe_text", tmp_path / "model", **WIDE, **heads)
    convert(folder, tmp_path / "packed.gguf", "q8_0")
    wide = gguf_files.widen(tmp_path / "packed.gguf", tmp_path / "wide.gguf")
    targets = ["out_proj", "in_proj_z", "o_proj"]
    found = {}
    for file in (tmp_path / "packed.gguf", wide):
        with MoE(file, dtype="float32") as moe, torch.no_grad():
            moe.preload()
            kinds = {type(layer) for layer in moe.model.modules()}
            assert (ReorderedLinear in kinds) == (file != wide)
            plain = logits_of(moe.model, TOKENS[:1, :9] % 60)
            adapter = adapted(moe.model, peft.LoraConfig(target_modules=targets, **RANDOM))
            names = [name for name, _ in adapter.named_parameters() if "lora_A" in name]
            found[file] = names, logits_of(adapter, TOKENS[:1, :9] % 60)
            assert (found[file][1] - plain).abs().max() > 1e-2 * plain.abs().max()
    (names, of_packed), (names_of_wide, of_wide) = found.values()
    assert names == names_of_wide
    assert any(".out_proj.lora_A" in name for name in names)
    assert_close(of_packed, of_wide)


def test_an_adapter_in_the_folder_of_a_model_is_loaded_with_it(tmp_path):
    folder = saved("Mixtral", tmp_path / "model")
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    adapted(stock, peft.LoraConfig(target_modules=ATTENTION, **RANDOM)).save_pretrained(folder)
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    with MoE(folder, host_memory="50%") as moe:
        assert any("lora_A" in name for name, _ in moe.model.named_parameters())
        assert_close(steps(moe.model), steps(stock))


def test_an_adapter_in_the_folder_that_does_not_fit_is_an_error(tmp_path):
    folder = saved("Mixtral", tmp_path / "model")
    stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    adapted(stock, peft.LoraConfig(target_modules=ATTENTION, **RANDOM)).save_pretrained(folder)
    file = folder / "adapter_config.json"
    config = json.loads(file.read_text("utf-8"))
    file.write_text(json.dumps(config | {"target_modules": ["nobody"]}), "utf-8")
    with pytest.raises(CheckpointError, match="its adapter cannot be loaded: .*nobody"):
        MoE(folder)


def test_adapters_on_experts_are_an_error(tmp_path):
    config = peft.LoraConfig(
        target_modules=["q_proj"], target_parameters=["experts.down_proj"], **RANDOM
    )
    with MoE(saved("Mixtral", tmp_path)) as moe, pytest.raises(UnsupportedModelError):
        steps(adapted(moe.model, config))


def test_passes_that_peft_begins_are_steps(tmp_path):
    """PEFT calls the model's forward method, and so no hook of the model."""
    with MoE(saved("Mixtral", tmp_path)) as moe:
        model = adapted(moe.model, peft.LoraConfig(target_modules=["v_proj"], **RANDOM))
        steps(model)
        assert (moe.report().prefill.steps, moe.report().decode.steps) == (1, 4)
