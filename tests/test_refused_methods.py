"""What else transformers' models can be asked for: a loaded model does it, or says at once that its
experts are not in memory. Never a file without experts, a weight that was made up, or NaN."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_infinity import MoE, UnsupportedModelError
from tests.architectures import encoder_decoders
from tests.sweep import discover, tiny

pytestmark = [pytest.mark.timeout(60), pytest.mark.arithmetic]
PROMPT = torch.tensor([[5, 6, 9, 100, 31]])
NOT_IN_MEMORY = "experts are not in memory"
CHECKPOINTING = "activation_checkpointing_enable"  # so since transformers 5.24
if not hasattr(PreTrainedModel, CHECKPOINTING):
    CHECKPOINTING = "gradient_checkpointing_enable"


@pytest.fixture(scope="module", params=[True, False], ids=["exact", "kernels"])
def moe(tiny_checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[MoE]:
    with MoE(tiny_checkpoint, host_memory="25%", exact=request.param) as moe:
        yield moe


@pytest.fixture(scope="module")
def logits(moe: MoE) -> torch.Tensor:
    return logits_of(moe.model)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(PROMPT).logits
    return found


def experts_of(model: Any) -> Any:
    return model.model.layers[1].mlp.experts


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "save_pretrained": (lambda model: model.save_pretrained("nowhere"), "copy .*tiny"),
    "push_to_hub": (lambda model: model.push_to_hub("somebody/model"), "upload .*tiny"),
    "init_weights": (lambda model: model.init_weights(), "initialised"),
    "initialize_weights": (lambda model: model.initialize_weights(), "initialised"),
    "eager": (lambda model: model.set_experts_implementation("eager"), "implementation eager"),
    "by part": (lambda model: model.set_experts_implementation({"": "grouped_mm"}), "grouped_mm"),
    "deepcopy": (copy.deepcopy, "copied"),
    "copy": (copy.copy, "copied"),
    "pickle": (pickle.dumps, "pickled"),
    "torch.save": (lambda model: torch.save(model, io.BytesIO()), "pickled"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_weights_is_refused_at_every_level(moe, logits, name):
    ask, message = REFUSED[name]
    parts = [part for part in moe.model.modules() if isinstance(part, PreTrainedModel)]
    assert len(parts) == 2, "the base model, too"
    for part in parts:
        with pytest.raises(UnsupportedModelError, match=f"{NOT_IN_MEMORY}.*{message}"):
            ask(part)
    assert torch.equal(logits_of(moe.model), logits)
    assert not Path("nowhere").exists()


@pytest.mark.parametrize("ask", [copy.deepcopy, pickle.dumps])
def test_parts_with_experts_are_not_copied(moe, ask):
    layer = moe.model.model.layers[0]
    for part in (layer, layer.mlp, layer.mlp.experts, moe):
        with pytest.raises(UnsupportedModelError, match="copied, pickled"):
            ask(part)


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight.sum(),
        lambda weight: weight.data,
        lambda weight: weight[0],
        lambda weight: weight + 1,
        lambda weight: linear(torch.ones(1, 32), weight),
        lambda weight: torch.nn.init.normal_(weight),
    ],
)
def test_a_weight_of_experts_cannot_be_used(moe, use):
    with pytest.raises(UnsupportedModelError, match="tensors of experts"):
        use(experts_of(moe.model).gate_up_proj)


def test_the_own_implementation_may_be_set_again(moe, logits):
    moe.model.set_experts_implementation("moe_infinity")
    assert torch.equal(logits_of(moe.model), logits)


def test_a_config_changed_behind_our_back_is_an_error_and_not_nan(moe, logits):
    config = moe.model.config
    config._experts_implementation = "eager"
    try:
        with pytest.raises(UnsupportedModelError, match="tensors of experts"):
            logits_of(moe.model)
    finally:
        config._experts_implementation = "moe_infinity"
    assert torch.equal(logits_of(moe.model), logits)


@pytest.mark.parametrize("level", ["whole", "base"])
def test_a_compiled_model_computes_as_it_does_uncompiled(moe, logits, level):
    """Dynamo traced our bookkeeping for minutes, and failed."""
    model = moe.model if level == "whole" else moe.model.model
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        hidden = compiled(PROMPT)
    found = hidden.logits if level == "whole" else moe.model.lm_head(hidden.last_hidden_state)
    torch.testing.assert_close(found, logits, rtol=0.02, atol=0.1)  # bfloat16, in other groups


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace:FutureWarning")  # from torch 2.15 on
@pytest.mark.filterwarnings(  # torch.jit.trace reads all attributes of transformers' models
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning:transformers.modeling_utils"
)
@pytest.mark.parametrize(
    "record",
    [
        lambda model: torch.export.export(model, (PROMPT,)),
        lambda model: torch.jit.trace(model, PROMPT),
    ],
)
def test_a_graph_of_the_experts_of_one_prompt_is_refused(moe, logits, record):
    with pytest.raises(UnsupportedModelError, match="traced or exported"):
        record(moe.model)
    assert torch.equal(logits_of(moe.model), logits)


def test_adapters_of_experts_are_refused_by_name(moe, logits):
    """PEFT finds no such parameter, and only warns. Adapters of other weights are left alone."""
    adapter = SimpleNamespace(target_parameters=["mlp.experts.gate_up_proj"])
    try:
        moe.model.peft_config = {"default": adapter}
        with pytest.raises(UnsupportedModelError, match="adapters.*'mlp.experts.gate_up_proj'"):
            logits_of(moe.model)
        adapter.target_parameters = ["self_attn.q_proj.weight"]
        assert torch.equal(logits_of(moe.model), logits)
    finally:
        del moe.model.peft_config


@pytest.mark.parametrize("path", ["", "model", "model.layers.1.mlp.experts"])
def test_other_experts_in_a_state_dict_are_refused(moe, logits, path):
    """With strict=False they were passed over without a word."""
    whole = "model.layers.1.mlp.experts.gate_up_proj"
    key = whole.removeprefix(f"{path}." if path else "")
    part = moe.model.get_submodule(path)
    others = {name: torch.zeros_like(x) for name, x in part.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(UnsupportedModelError, match="load other experts .*gate_up_proj"):
            part.load_state_dict(others | {key: torch.ones(1)}, strict=strict)
    assert torch.equal(logits_of(moe.model), logits)


def test_a_router_that_is_trained_alone_is_an_error(moe):
    """Its gradient was left out without a word, and `backward` did nothing."""
    router = moe.model.model.layers[1].mlp.gate
    moe.model.requires_grad_(False)
    router.requires_grad_(True)
    try:
        with pytest.raises(UnsupportedModelError, match="cannot be trained"):
            moe.model(PROMPT).logits.sum().backward()
    finally:
        moe.model.requires_grad_(True)


def test_threads_that_call_a_model_inside_wait_for_each_other(moe):
    found: list[torch.Tensor] = []

    def call() -> None:
        with torch.no_grad():
            found.append(moe.model.model(PROMPT).last_hidden_state)

    call()
    thread = threading.Thread(target=call)
    with moe._lock:
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        assert len(found) == 1
    thread.join(30)
    assert torch.equal(*found)


def test_what_changes_nothing_changes_nothing(moe, logits):
    for ask in (
        lambda model: model.tie_weights(),
        lambda model: model.requires_grad_(False),
        lambda model: getattr(model, CHECKPOINTING)(),
        lambda model: model.eval(),
        lambda model: model.load_state_dict(model.state_dict()),
    ):
        ask(moe.model)
        assert torch.equal(logits_of(moe.model), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_cast_after_loading_gives_the_bits_of_stock(tiny_checkpoint, dtype):
    """Experts went on to compute in the dtype that they were loaded in."""
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype="auto").to(dtype)
    with MoE(tiny_checkpoint, host_memory="25%", exact=True) as moe:
        moe.model.to(dtype)
        assert torch.equal(logits_of(moe.model), logits_of(stock))
        moe.model.to(torch.bfloat16)
        assert torch.equal(logits_of(moe.model), logits_of(stock.to(torch.bfloat16)))


def test_a_loaded_model_has_the_buffers_of_stock(tiny_checkpoint):
    """transformers' tests compare their names."""
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype="auto")
    with MoE(tiny_checkpoint, host_memory="25%") as moe:
        assert [*dict(moe.model.named_buffers())] == [*dict(stock.named_buffers())]


@pytest.mark.parametrize("name", ["NllbMoe", "SwitchTransformers"])
def test_an_encoder_decoder_can_be_cast(tmp_path, name):
    encoder_decoders.make_model(name).save_pretrained(tmp_path)
    with MoE(tmp_path, host_memory="25%") as moe:
        moe.model.half()
        moe.generate(input_ids=encoder_decoders.PROMPT, max_new_tokens=4)


def noted(*_: Any) -> None:
    """A hook."""


INSIDE: dict[str, tuple[str, str, str]] = {  # module of experts, one whose code does not run
    "SwitchTransformers": ("", "encoder.block.1.layer.1.mlp.experts.expert_1", "act"),
    "NllbMoe": ("", "model.encoder.layers.1.ffn.experts.expert_1", "act"),
    "DbrxForCausalLM": ("dbrx", "transformer.blocks.1.ffn.experts.mlp", "activation_fn"),
    "Llama4ForCausalLM": ("llama4", "model.layers.1.feed_forward.experts", "act_fn"),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_is_done_to_modules_inside_experts_is_refused(tmp_path, name):
    """Their own code never runs: a hook would not be called, another activation not be used."""
    kind, path, activation = INSIDE[name]
    if kind:
        (found,) = [a for a in discover.architectures_in(kind) if a.name == name]
        tiny.tiny_model(found).save_pretrained(tmp_path)
    else:
        encoder_decoders.make_model(name).save_pretrained(tmp_path)
    with MoE(tmp_path, host_memory="50%") as moe:
        inputs = {"input_ids": PROMPT % 90, "max_new_tokens": 2, "do_sample": False}
        expected = moe.generate(**inputs)
        inside = moe.model.get_submodule(path)
        for hook in (inside.register_forward_hook(noted), inside.register_forward_pre_hook(noted)):
            with pytest.raises(UnsupportedModelError, match="hooks in them"):
                moe.generate(**inputs)
            hook.remove()
        own = getattr(inside, activation)
        setattr(inside, activation, nn.Tanh())
        with pytest.raises(UnsupportedModelError, match="changed experts"):
            moe.generate(**inputs)
        setattr(inside, activation, own)
        assert torch.equal(moe.generate(**inputs), expected)
