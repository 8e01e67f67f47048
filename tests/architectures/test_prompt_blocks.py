"""Long prompts in blocks: the model's own layers give the same for parts of a prompt as for all of
it, experts are read once for all blocks, and nobody's hook or odd layer sees a part."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from moe_infinity import MoE
from moe_infinity.architectures import prompt_blocks
from moe_infinity.architectures.attention_inputs import cache_parameter
from moe_infinity.architectures.trial import Differs, FellBack
from moe_infinity.experts import Phase, Step
from moe_infinity.kernels.kv_layers import new_cache
from moe_infinity.memory import room as room_module
from tests.closeness import distance
from tests.sweep import discover, tiny

pytestmark = pytest.mark.arithmetic

# Attention with windows and sinks, latent, of two kinds, twice in a layer, and linear.
NAMED = {
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma4ForCausalLM": "gemma4",
    "LongcatFlashForCausalLM": "longcat_flash",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Llama4ForCausalLM": "llama4",
    "NemotronHForCausalLM": "nemotron_h",
}
FAST = ("Qwen3MoeForCausalLM", "GptOssForCausalLM", "Qwen3NextForCausalLM")
ALL = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in NAMED]
TOLERANCE = 3e-4  # of the largest logit, float32; the chunks of linear attention begin elsewhere
BLOCK = 64
IDS = torch.randint(3, 120, (1, 200), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(room_module, "BLOCK_SIZES", (BLOCK,))


def opened(name: str, folder: Any, **options: Any) -> MoE:
    (architecture,) = [a for a in discover.architectures_in(NAMED[name]) if a.name == name]
    tiny.tiny_model(architecture).save_pretrained(folder)
    return MoE(folder, dtype="float32", **{"host_memory": "50%", **options})


@pytest.fixture
def moe(tmp_path) -> Iterator[MoE]:
    with opened("Qwen3MoeForCausalLM", tmp_path) as moe:
        yield moe


@torch.no_grad()
def logits_of(moe: MoE, ids: Tensor, ends: list[int], **inputs: Any) -> Tensor:
    """Of the passes that end there, one after the other with one cache."""
    cache = {cache_parameter(moe.model.forward): new_cache(moe.model.config, "auto")}
    starts = [0, *ends]
    return torch.cat(
        [
            moe.model(input_ids=ids[:, start:end], use_cache=True, **cache, **inputs).logits
            for start, end in zip(starts, ends, strict=False)
        ],
        dim=1,
    )


@pytest.fixture
def cut(monkeypatch) -> list[int]:
    """How many blocks each call of a decoder layer had, that had more than one token."""
    seen: list[int] = []
    blocks_of = prompt_blocks._blocks

    def counted(num_tokens: int, size: int | None) -> Any:
        blocks = blocks_of(num_tokens, size)
        if num_tokens > 1 and size is not None:
            seen.append(len(blocks))
        return blocks

    monkeypatch.setattr(prompt_blocks, "_blocks", counted)
    return seen


def without_blocks(monkeypatch) -> None:
    monkeypatch.setattr(room_module, "BLOCK_SIZES", (1 << 20,))


def test_what_all_blocks_of_a_prompt_activated_is_shown(moe, cut, monkeypatch):
    """The last block, of one token, activates fewer."""
    ids = IDS[:, : BLOCK + 1]
    logits_of(moe, ids, [BLOCK + 1])
    assert 2 in cut
    shown = [set(activated) for activated in moe.engine.bookkeeping.activated]
    without_blocks(monkeypatch)
    logits_of(moe, ids, [BLOCK + 1])
    assert shown == [set(activated) for activated in moe.engine.bookkeeping.activated]


@pytest.mark.sample(3)
@pytest.mark.parametrize("ends", [[200], [30, 200]], ids=["whole", "behind others"])
@pytest.mark.parametrize("name", ALL)
def test_a_prompt_in_blocks_gives_the_logits_of_one_that_is_not_cut(
    name, ends, tmp_path, cut, monkeypatch
):
    with opened(name, tmp_path) as moe:
        found = logits_of(moe, IDS, ends)
        assert cut.count(len(prompt_blocks._blocks(ends[-1] - ends[-2] if ends[1:] else 200, 64)))
        del cut[:]
        without_blocks(monkeypatch)
        assert distance(found, logits_of(moe, IDS, ends)) < TOLERANCE
        assert not cut
        moe.check_invariants()


def test_tokens_behind_the_prompt_are_the_same(moe, monkeypatch):
    found = moe.generate(IDS, max_new_tokens=8, do_sample=False)
    without_blocks(monkeypatch)
    assert torch.equal(found, moe.generate(IDS, max_new_tokens=8, do_sample=False))


def test_what_a_prompt_activates_is_recorded_once_for_all_tokens(moe, monkeypatch):
    logits_of(moe, IDS, [200])
    routing = moe.last_routing()
    (eam,) = moe.request_eams()
    without_blocks(monkeypatch)
    logits_of(moe, IDS, [200])
    assert (routing == moe.last_routing()).all()
    assert (eam.prefill == moe.request_eams()[0].prefill).all()


def test_padding_does_not_count_in_blocks_either(moe, monkeypatch):
    mask = torch.ones_like(IDS)
    mask[:, :70] = 0
    logits_of(moe, IDS, [200], attention_mask=mask)
    (eam,) = moe.request_eams()
    assert (eam.prefill.sum(axis=1) == 130 * 3).all()


def test_each_absent_expert_is_read_once_if_those_of_a_layer_have_room(tmp_path):
    with opened("Qwen3MoeForCausalLM", tmp_path, host_memory="32%", preload="off") as moe:
        assert moe.report().tiers[0].capacity == 10  # of 32, 8 in each layer
        logits_of(moe, IDS, [200])  # what it leaves in the slots is like what was there before
        before = moe.report().prefill.bytes_read
        logits_of(moe, IDS, [200])
        num_read = moe.report().prefill.bytes_read - before
        assert num_read <= moe.engine.stored_expert_bytes


def test_few_slots_are_enough(tmp_path, monkeypatch):
    with opened("Qwen3MoeForCausalLM", tmp_path, host_memory="4%", preload="off") as moe:
        assert moe.report().tiers[0].capacity == 1
        found = logits_of(moe, IDS, [200])
        without_blocks(monkeypatch)
        assert distance(found, logits_of(moe, IDS, [200])) < TOLERANCE
        moe.check_invariants()


# What sees a layer sees all tokens


def test_a_hook_in_a_layer_sees_all_tokens_of_the_prompt(moe, cut):
    seen = []
    norm = moe.model.model.layers[2].post_attention_layernorm
    hook = norm.register_forward_hook(lambda module, args, out: seen.append(out.shape[1]))
    logits_of(moe, IDS, [200])
    assert seen == [200]
    assert not cut
    hook.remove()
    logits_of(moe, IDS, [200])
    assert cut.count(4) == 5  # with the norm behind them


def test_router_logits_that_are_asked_for_have_a_row_for_each_token(moe):
    out = moe.model(input_ids=IDS, output_router_logits=True)
    assert [len(logits) for logits in out.router_logits] == [200] * 4


class OnTheMean(nn.Module):
    """A norm that mixes tokens, as no block of them can."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x) + 3 * x.mean(dim=1, keepdim=True)
        return out


def test_a_layer_that_mixes_tokens_otherwise_gets_all_of_them(moe, cut):
    logits_of(moe, IDS, [200])
    assert cut.count(4) == 5  # with the norm behind them
    layer = moe.model.model.layers[1]
    layer.input_layernorm = OnTheMean(layer.input_layernorm)
    del cut[:]
    logits_of(moe, IDS, [200])
    assert 4 not in cut, "it was tried, and found to differ"


def test_a_mask_that_looks_ahead_is_not_cut(moe):
    mask = torch.ones(1, 1, 200, 200, dtype=torch.bool).tril()
    mask[:, :, 40:80, 40:80] = True  # over the end of a block, as the tokens of an image
    logits_of(moe, IDS, [200])
    num_cut = moe.engine._blocks._num_cut
    found = logits_of(moe, IDS, [200], attention_mask=mask)
    assert distance(found, logits_of(moe, IDS, [200])) > TOLERANCE
    assert moe.engine._blocks._num_cut == num_cut + 4, "those of the second, without such a mask"


def test_a_mask_is_looked_at_again_when_blocks_become_shorter(moe, monkeypatch):
    """The tokens of an image lie within a long block, and over the end of a short one."""
    mask = torch.ones(1, 1, 200, 200, dtype=torch.bool).tril()
    mask[:, :, 20:80, 20:80] = True
    monkeypatch.setattr(room_module, "BLOCK_SIZES", (200,))
    expected = logits_of(moe, IDS, [200], attention_mask=mask)
    monkeypatch.setattr(room_module, "BLOCK_SIZES", (100,))
    blocks = moe.engine._blocks
    run_layer = moe.engine.path.run_layer

    def run_and_shorten(*args: Any) -> Any:
        blocks.most = 50
        return run_layer(*args)

    monkeypatch.setattr(moe.engine.path, "run_layer", run_and_shorten)
    num_cut = blocks._num_cut
    assert distance(logits_of(moe, IDS, [200], attention_mask=mask), expected) < TOLERANCE
    assert blocks._num_cut > num_cut, "at least the first layer"


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_mask_that_is_changed_in_place_is_looked_at_again(moe, monkeypatch, is_inference):
    with torch.inference_mode(is_inference):
        mask = torch.ones(1, 1, 200, 200, dtype=torch.bool).tril()
        logits_of(moe, IDS, [200], attention_mask=mask)
        mask[:, :, 40:80, 40:80] = True  # over the end of a block
        found = logits_of(moe, IDS, [200], attention_mask=mask)
        without_blocks(monkeypatch)
        assert distance(found, logits_of(moe, IDS, [200], attention_mask=mask)) < TOLERANCE


def test_a_call_of_the_decoder_alone_is_not_cut_as_the_last_prompt_was(moe):
    logits_of(moe, IDS, [200])
    seen: list[int] = []

    def note(module: nn.Module, args: Any, out: Any) -> None:
        seen.append(out[0].shape[1])

    moe.model.model.layers[0].self_attn.register_forward_hook(note)
    with torch.no_grad():
        moe.model.model(input_ids=IDS)
    assert seen == [200]


@pytest.mark.parametrize("is_decorated", [False, True])
def test_a_patched_decoder_may_keep_what_each_layer_gave(moe, monkeypatch, is_decorated):
    kept: list[Tensor] = []
    kind = type(moe.model.model)
    cache_name = cache_parameter(kind.forward)

    def forward(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        places = torch.arange(input_ids.shape[1])[None]
        x = self.embed_tokens(input_ids)
        given = {"position_embeddings": self.rotary_emb(x, places), "attention_mask": None}
        for layer in self.layers:
            kept.append(x)
            x = layer(x, use_cache=True, **given, **{cache_name: kwargs[cache_name]})
        return MoeModelOutputWithPast(last_hidden_state=self.norm(x))

    monkeypatch.setattr(kind, "forward", torch.no_grad()(forward) if is_decorated else forward)
    blocks = moe.engine._blocks
    logits_of(moe, IDS, [200])
    num_layers = len(moe.model.model.layers)
    assert blocks._num_cut == 2 * num_layers, "in the trial, and now"
    inputs = kept[-num_layers:]
    assert not any(torch.equal(a, b) for a, b in pairwise(inputs))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
def test_masks_that_show_a_token_of_a_later_block_are_noticed(dtype):
    blocks = prompt_blocks._blocks(200, BLOCK)
    mask = torch.ones(1, 1, 200, 230, dtype=torch.bool).tril(30)

    def shows_later() -> bool:
        numbers = torch.zeros(mask.shape, dtype=dtype)
        if dtype == torch.bool:
            return prompt_blocks._shows_later(blocks, mask)
        lowest = torch.finfo(dtype).min
        return prompt_blocks._shows_later(blocks, numbers.masked_fill_(~mask, lowest))

    assert not shows_later()
    mask[0, 0, 5, 30 + 49] = True  # of its own block
    assert not shows_later()
    mask[0, 0, 5, 30 + 50] = True
    assert shows_later()


def test_an_error_in_a_block_leaves_a_model_that_goes_on(moe, monkeypatch):
    expected = logits_of(moe, IDS, [200])
    run_layer = moe.engine.path.run_layer
    calls = []

    def failing(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 6:
            raise OSError("the disk is gone")
        run_layer(*args)

    monkeypatch.setattr(moe.engine.path, "run_layer", failing)
    with pytest.raises(OSError, match="the disk is gone"):
        logits_of(moe, IDS, [200])
    assert distance(logits_of(moe, IDS, [200]), expected) < TOLERANCE
    moe.check_invariants()


def test_a_window_of_the_cache_that_no_mask_has_is_not_cut(tmp_path, monkeypatch):
    """The model attends to all tokens of a pass; blocks would get a window of them. The trial is
    shorter than the window, so it does not see that."""
    (architecture,) = discover.architectures_in("qwen3_vl_moe")
    config = tiny.tiny_config(architecture)
    config.text_config.sliding_window = 150
    tiny.random_model(architecture, config).save_pretrained(tmp_path)
    with MoE(tmp_path, dtype="float32") as moe:
        found = logits_of(moe, IDS, [200])
        blocks = moe.engine._blocks
        assert blocks is not None
        assert blocks.are_usable()
        without_blocks(monkeypatch)
        assert distance(found, logits_of(moe, IDS, [200])) < TOLERANCE


def test_a_layer_with_two_groups_of_experts_is_not_cut(tmp_path):
    (architecture,) = discover.architectures_in("ernie4_5_vl_moe")
    tiny.tiny_model(architecture).save_pretrained(tmp_path)
    with MoE(tmp_path, dtype="float32") as moe:
        blocks = moe.engine._blocks
        assert blocks is not None
        assert not blocks.are_usable()
        assert blocks._verdict == FellBack("a layer has two groups of experts", has_run=True)


def test_layers_that_take_all_tokens_after_all_get_the_memory_for_them(moe, monkeypatch):
    freed: list[int] = []
    logits_of(moe, IDS, [200])
    monkeypatch.setattr(moe.engine.room, "keep_free", freed.append)
    with torch.no_grad():
        moe.model(input_ids=IDS, use_cache=False)
    needs = moe.engine.room.needs
    assert needs.of_pass(200, 200, BLOCK) < 200 * needs.per_token
    assert freed.count(200 * needs.per_token) == 1, "for all layers"


def test_the_experts_of_a_layer_stay_while_others_run_between_blocks(tmp_path):
    with opened("Qwen3MoeForCausalLM", tmp_path, host_memory="32%", preload="off") as moe:
        logits_of(moe, IDS, [200])
        short = {"input_ids": IDS[:, :3], "use_cache": True}
        quotas = []

        def others() -> None:
            moe.model(**short)
            quotas.append(moe.engine.tiers[0].table.least_quota)

        step = Step(Phase.PREFILL, 1, 200, begins_B=np.ones(1, dtype=bool), context=200)
        cache = new_cache(moe.model.config, "auto")
        moe.forward(step, cache=cache, others=others, input_ids=IDS, use_cache=True)
        assert len(quotas) == 4 * 4 - 1
        assert moe.engine.tiers[0].table.least_quota == 8


@torch.no_grad()
def test_a_layer_that_makes_another_dtype_is_not_rounded(moe):
    blocks = moe.engine._blocks
    blocks.size = BLOCK
    given = {"past_key_values": new_cache(moe.model.config, "auto")}
    with pytest.raises(Differs, match=r"makes torch.float64 of torch.float32"):
        blocks._forward(
            moe.model.model.layers[1], lambda x, **_: x.double(), torch.ones(1, 200, 64), **given
        )
    assert blocks.current is None


def test_a_model_that_changes_all_the_time_is_not_tried_all_the_time(moe):
    blocks = moe.engine._blocks
    layer = moe.model.model.layers[0]
    for i in range(6):
        layer.marked = i
        is_usable = blocks.are_usable()
        assert is_usable == (i < prompt_blocks.MOST_TRIALS)
    assert blocks._num_tried == prompt_blocks.MOST_TRIALS
