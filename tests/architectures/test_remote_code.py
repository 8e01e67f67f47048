"""Models that bring their own modelling code, with experts in an nn.ModuleList or nn.ModuleDict:
the tokens of stock transformers, and no code of a folder is run unasked."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, dynamic_module_utils

from moe_infinity import ConfigError, MoE, UnsupportedModelError
from moe_infinity.cli.inspection import inspect_checkpoint
from tests.on_demand import ON_DEMAND
from tests.remote_code.checkpoints import MODELS, save_remote_code_model

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(5)]

BUDGETS = ["6.3%", "50%", "100%"]  # the first is one slot: 16 or 24 experts in all
PROMPT = torch.arange(3, 3 + 26).view(2, 13) * 4 % 128  # two sequences
NUM_STEPS = 7  # decode steps of 8 tokens, where no more are needed
GREEDY: dict[str, Any] = {"max_new_tokens": NUM_STEPS + 1, "do_sample": False}


@pytest.fixture(scope="module", autouse=True)
def modules_cache(tmp_path_factory):
    """transformers copies remote code to a folder of the user's and imports it from there."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("modules")
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.setattr(sys, "path", list(sys.path))
        forget_remote_modules()
        yield
    forget_remote_modules()


def forget_remote_modules() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]


@pytest.fixture(scope="module", params=MODELS)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(name, modules_cache, tmp_path_factory) -> Path:
    return save_remote_code_model(tmp_path_factory.mktemp(name), name)


@pytest.fixture(scope="module")
def stock(checkpoint) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True, dtype="auto")
    assert model.dtype == torch.bfloat16
    return model


def open_moe(folder: Path, **options: Any) -> MoE:
    return MoE(folder, trust_remote_code=True, **({"host_memory": "50%"} | options))


@torch.no_grad()
def prefill_and_generate(model: Any, input_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Logits of every prompt token, 10 greedy tokens, and the logits each was chosen from."""
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    out = model.generate(
        **inputs,
        max_new_tokens=10,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return model(**inputs).logits, out.sequences, torch.stack(out.logits)


def generate_with(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """8 tokens of a MoE or of a model of transformers."""
    return model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **GREEDY)


def chosen_by_routers(model: Any, input_ids: torch.Tensor) -> np.ndarray:
    """[2, sequences, MoE layers, experts]: how often the stock routers chose each expert in prefill
    and in decode."""
    gates = [module for name, module in model.named_modules() if name.endswith(".gate")]
    counts = np.zeros((2, len(input_ids), len(gates), 8), dtype=np.int64)

    def watch(row: int, output: Any) -> None:
        index_TK = (
            output[0]
            if isinstance(output, tuple)
            else output.softmax(1, dtype=torch.float).topk(2).indices
        )
        is_decode = int(len(index_TK) == len(input_ids))
        for sequence_idx, ids in enumerate(index_TK.reshape(len(input_ids), -1)):
            counts[is_decode, sequence_idx, row] += np.bincount(ids.numpy(), minlength=8)

    hooks = [
        gate.register_forward_hook(lambda *args, row=row: watch(row, args[-1]))
        for row, gate in enumerate(gates)
    ]
    generate_with(model, input_ids)
    for hook in hooks:
        hook.remove()
    return counts


# the same result as stock


def test_stock_depends_on_the_prompt_and_uses_many_experts(stock):
    """Otherwise equality with it would prove little."""
    logits, sequences, _ = prefill_and_generate(stock, PROMPT)
    assert logits.isfinite().all()
    assert not torch.equal(sequences[0, 13:], sequences[1, 13:])
    assert all(len(set(new.tolist())) >= 5 for new in sequences[:, 13:])
    counts = chosen_by_routers(stock, PROMPT)
    assert ((counts.sum(axis=(0, 1)) > 0).sum(axis=1) >= 6).all()


@pytest.mark.sample(1)
@pytest.mark.grid
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_prefill_and_greedy_tokens_are_bitwise_those_of_stock(checkpoint, stock, num_sequences):
    expected = prefill_and_generate(stock, PROMPT[:num_sequences])
    assert expected[1].shape == (num_sequences, 13 + 10)
    for budget in BUDGETS:
        with open_moe(checkpoint, host_memory=budget, exact=True) as moe:
            found = prefill_and_generate(moe.model, PROMPT[:num_sequences])
            moe.check_invariants()
            capacity = moe.report().tiers[0].capacity
        assert (capacity == 1) == (budget == BUDGETS[0])
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs), (budget, (ours - theirs).abs().max())


def test_a_padded_batch_gives_the_tokens_of_stock_and_padding_is_not_counted(
    name, checkpoint, stock
):
    mask = torch.ones_like(PROMPT)
    mask[0, :4] = 0
    expected = stock.generate(PROMPT, attention_mask=mask, **GREEDY)
    with open_moe(checkpoint, exact=True) as moe:
        assert torch.equal(moe.generate(PROMPT, attention_mask=mask, **GREEDY), expected)
        eams = moe.request_eams()
    top_k = MODELS[name].top_k
    assert [set(eam.prefill.sum(axis=1)) for eam in eams] == [{9 * top_k}, {13 * top_k}]


@pytest.mark.grid
@pytest.mark.parametrize(
    "options",  # elsewhere the policy is activation-aware
    [{"policy": "lru"}, {"prefetch": True}, {"prefetch": True, "early_router": True}],
    ids=["lru", "prefetch", "early_router"],
)
def test_neither_policy_nor_prefetch_changes_a_token(checkpoint, options):
    with open_moe(checkpoint, host_memory="100%") as moe:
        expected = generate_with(moe, PROMPT)
    with open_moe(checkpoint, **options) as moe:
        for _ in range(2):  # the second time with something learned
            assert torch.equal(generate_with(moe, PROMPT), expected)
        moe.check_invariants()


def test_pickled_weights_give_the_tokens_of_stock(checkpoint, stock, copy_of):
    """As Grok-1 was published for transformers."""
    folder = copy_of(checkpoint)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with open_moe(folder, exact=True) as moe:
        assert torch.equal(generate_with(moe, PROMPT), generate_with(stock, PROMPT))


def test_experts_fed_by_experts_are_computed_right_or_refused(tmp_path):
    """What the first round is fed does not depend on any expert, what the second is does."""
    folder = save_remote_code_model(tmp_path / "chained", "DeepseekMoe", num_rounds=2)
    stock = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype="auto")
    with open_moe(folder, exact=True) as moe, torch.no_grad():
        try:
            found = moe.model(PROMPT).logits
        except UnsupportedModelError:
            return
        assert torch.equal(found, stock(PROMPT).logits)


def test_two_experts_swapped_in_the_checkpoint_change_the_logits(checkpoint, copy_of):
    """Or else equality with stock would not show that the right experts were computed."""
    folder = copy_of(checkpoint)
    moved = {
        re.sub(
            r"(\.experts\.\D*)([26])\.", lambda found: f"{found[1]}{8 - int(found[2])}.", key
        ): tensor
        for key, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    with open_moe(checkpoint) as whole, open_moe(folder) as swapped, torch.no_grad():
        assert not torch.equal(swapped.model(PROMPT).logits, whole.model(PROMPT).logits)


# what is counted


@pytest.mark.grid
@pytest.mark.parametrize("num_sequences", [1, 2])
def test_the_eam_of_each_sequence_counts_what_the_routers_chose(
    name, checkpoint, stock, num_sequences
):
    expected = chosen_by_routers(stock, PROMPT[:num_sequences])
    assert expected.shape == (2, num_sequences, MODELS[name].num_moe_layers, 8)
    with open_moe(checkpoint, exact=True) as moe:
        generate_with(moe, PROMPT[:num_sequences])
        eams = moe.request_eams()
    assert len(eams) == num_sequences
    top_k = MODELS[name].top_k
    for sequence_idx, eam in enumerate(eams):
        assert (eam.decode.sum(axis=1) == NUM_STEPS * top_k).all()
        assert (eam.prefill == expected[0, sequence_idx]).all()
        assert (eam.decode == expected[1, sequence_idx]).all()


def test_an_expert_called_without_tokens_is_not_looked_up(name, checkpoint):
    """Grok's loop calls every expert in every step; a lookup of each would load each."""
    with open_moe(checkpoint, **ON_DEMAND) as moe:
        generate_with(moe, PROMPT[:1])
        decode, prefill = moe.report().decode, moe.report().prefill
        prefill_eam = moe.request_eams()[0].prefill
    assert prefill.hits + prefill.late_hits + prefill.misses == (prefill_eam > 0).sum()
    assert prefill.misses > 0
    lookups = decode.hits + decode.late_hits + decode.misses
    assert lookups == NUM_STEPS * MODELS[name].num_moe_layers * MODELS[name].top_k


def test_a_recording_has_every_token_the_eam_counts(name, checkpoint):
    with open_moe(checkpoint) as moe:
        with moe.recording() as traces:
            generate_with(moe, PROMPT)
            recorded = traces()
        eams = moe.request_eams()
    assert len(recorded) == 2
    for trace, eam in zip(recorded, eams, strict=True):
        shape = 13 + NUM_STEPS, MODELS[name].num_moe_layers, MODELS[name].top_k
        assert trace.experts_TLK.shape == shape
        for moe_layer_idx in range(MODELS[name].num_moe_layers):
            counts = np.bincount(trace.experts_TLK[:, moe_layer_idx].ravel(), minlength=8)
            assert (counts == (eam.prefill + eam.decode)[moe_layer_idx]).all()


# whose code is run


def test_code_of_a_folder_is_not_run_unless_asked_for(
    name, checkpoint, copy_of, tmp_path, monkeypatch
):
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers asks, and runs on "y"
    folder, ran = copy_of(checkpoint), tmp_path / "ran"
    for file in folder.glob("*.py"):
        with file.open("a") as stream:
            stream.write(f"\nopen({str(ran)!r}, 'w').close()\n")
    refused: tuple[dict[str, Any], ...] = ({}, {"trust_remote_code": False})
    for options in refused:
        with pytest.raises((UnsupportedModelError, ConfigError), match="trust_remote_code"):
            MoE(folder, host_memory="50%", **options)
    with pytest.raises((UnsupportedModelError, ConfigError), match="trust_remote_code"):
        inspect_checkpoint(str(folder))
    assert not ran.exists()
    with open_moe(folder) as moe:
        generate_with(moe, PROMPT)
    assert ran.exists()


def test_a_trusted_folder_can_be_inspected(name, checkpoint):
    found = inspect_checkpoint(str(checkpoint), trust_remote_code=True)
    assert (found.moe_layers, found.experts_per_layer) == (MODELS[name].num_moe_layers, 8)
    stored = load_file(checkpoint / "model.safetensors")
    num_bytes = sum(t.nbytes for key, t in stored.items() if ".experts." in key)
    assert found.expert_bytes == num_bytes


def test_a_model_transformers_knows_runs_as_ever_when_code_is_trusted(tiny_checkpoint, stock_model):
    expected = stock_model.generate(PROMPT, **GREEDY)
    with open_moe(tiny_checkpoint, exact=True) as moe:
        assert torch.equal(moe.generate(PROMPT, **GREEDY), expected)
