"""Keys and values in 8 bits: what is near what, what is equal, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from moe_infinity import ConfigError, MoE, UnsupportedModelError
from moe_infinity.kernels.cpu.decoder_steps import DecoderSteps
from moe_infinity.kernels.kv_layers import new_cache
from moe_infinity.kernels.kv_rows import SCALE_BYTES, packed_rows, unpacked_rows
from moe_infinity.memory.needs import kv_bytes_of
from tests.architectures.test_decoder_layers import saved
from tests.cache_name import CACHE
from tests.on_demand import ON_DEMAND
from tests.prefixes.tiny_models import KINDS, TEXT, save_tiny

pytestmark = pytest.mark.arithmetic

KV_DTYPES = ("int8", "fp8")
TOKENS = torch.tensor([TEXT[:60]])
# Of the largest logit. Two ways to sum in float32 may round a number to neighbouring codes; 1e-5
# was seen. Packing itself changes these models by 0.01 and more.
NEAR = 5e-4
STEP = 1e-2  # the same, where sums in another order give a number the neighbouring code


@pytest.fixture(scope="module", params=["Qwen3Moe", "GptOss"])
def checkpoint(request, tmp_path_factory) -> Path:
    return saved(request.param, tmp_path_factory.mktemp(request.param))


@torch.no_grad()
def logits_of(
    model: Any, kv_dtype: str, tokens: Tensor = TOKENS, *, passes: tuple[int, ...] = (20,)
) -> tuple[Tensor, DynamicCache]:
    """[B, T, vocabulary] of a prompt in passes that end there, and then token by token."""
    cache = new_cache(model.config, kv_dtype)
    found = []
    ends = [*passes, *range(passes[-1] + 1, tokens.shape[1] + 1)]
    for start, stop in zip([0, *ends], ends, strict=False):
        found.append(model(tokens[:, start:stop], **{CACHE: cache}).logits)
    return torch.cat(found, dim=1), cache


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


@pytest.mark.sample(2)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_kernels_attend_as_the_modules_own_code_does_with_the_same_rows(
    checkpoint, kv_dtype, monkeypatch
):
    seen: list[str] = []
    attend = DecoderSteps.attend

    def counted(self: DecoderSteps, layer: int, *args: Any) -> Any:
        seen.append(self._kernels[layer].cache_kind)
        return attend(self, layer, *args)

    monkeypatch.setattr(DecoderSteps, "attend", counted)
    stock = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    wanted, _ = logits_of(stock, kv_dtype)
    plain, _ = logits_of(stock, "auto")
    with MoE(checkpoint, host_memory="30%", kv_dtype=kv_dtype, **ON_DEMAND) as moe:
        seen.clear()  # it was tried
        found, cache = logits_of(moe.model, kv_dtype)
        assert seen == [kv_dtype] * 3 * 40
        assert {layer.keys.dtype for layer in cache.layers} == {torch.uint8}
        seen.clear()
        logits_of(moe.model, "auto")
        assert not seen, "a cache of another kind is for the modules' own code"
    assert distance(found, wanted) < NEAR
    assert distance(plain, wanted) > 10 * NEAR


@pytest.mark.sample(2)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_no_budget_changes_a_bit(checkpoint, kv_dtype):
    found = []
    for budget in ("20%", "100%"):
        with MoE(checkpoint, host_memory=budget, kv_dtype=kv_dtype, preload="wait") as moe:
            moe.preload()
            found.append(logits_of(moe.model, kv_dtype)[0])
    assert torch.equal(*found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_prompt_in_chunks_attends_to_the_same_rows(checkpoint, kv_dtype):
    with MoE(checkpoint, kv_dtype=kv_dtype) as moe:
        whole, _ = logits_of(moe.model, kv_dtype)
        chunks, _ = logits_of(moe.model, kv_dtype, passes=(3, 10, 20))
        tokens, _ = logits_of(moe.model, kv_dtype, passes=(2,))
    assert distance(chunks, whole) < STEP
    assert distance(tokens, whole) < STEP


def test_fresh_keys_are_seen_as_they_are_stored():
    layer = new_cache(transformers.Qwen3MoeConfig(num_hidden_layers=1), "int8").layers[0]
    keys, values = torch.randn(2, 2, 3, 9, 16)
    seen = layer.update(keys[:, :, :5], values[:, :, :5])
    assert torch.equal(
        seen[0], unpacked_rows(packed_rows(keys, "int8"), "int8", keys.dtype)[:, :, :5]
    )
    seen = layer.update(keys[:, :, 5:], values[:, :, 5:])
    for found, given in zip(seen, (keys, values), strict=True):
        assert torch.equal(found, unpacked_rows(packed_rows(given, "int8"), "int8", given.dtype))
    layer.reorder_cache(torch.tensor([1, 1]))
    layer.crop(-2)
    assert torch.equal(layer.keys, packed_rows(keys[[1, 1], :, :7], "int8"))


# generate()


@pytest.mark.sample(4)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False},
        {"do_sample": True, "temperature": 1.5},
        {"num_beams": 3, "do_sample": False},
        {"num_return_sequences": 2, "do_sample": True},
        {"do_sample": False, "prefill_chunk_size": 16},
    ],
    ids=str,
)
def test_generate_keeps_packed_rows(checkpoint, kv_dtype, settings):
    """And what it continues with is what its own logits say, whatever the budget."""
    ids = TOKENS[:, :40].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    found = []
    for budget in ("20%", "100%"):
        with MoE(checkpoint, host_memory=budget, kv_dtype=kv_dtype) as moe:
            transformers.set_seed(3)
            out = moe.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=12,
                return_dict_in_generate=True,
                **settings,
            )
        found.append(out.sequences)
        cache = out[CACHE]
        assert {layer.keys.dtype for layer in cache.layers} == {torch.uint8}
        assert {layer.kv_dtype for layer in cache.layers} == {kv_dtype}
        assert out.sequences.shape[1] == 52
    assert torch.equal(*found)


def test_beams_are_those_of_stock_with_the_same_rows(checkpoint):
    ids = TOKENS[:, :30]
    settings = {"num_beams": 4, "max_new_tokens": 6, "do_sample": False}
    stock = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    given = {CACHE: new_cache(stock.config, "int8"), "return_dict_in_generate": True}
    wanted = stock.generate(ids, output_scores=True, **settings, **given)
    with MoE(checkpoint, kv_dtype="int8") as moe:
        found = moe.generate(ids, output_scores=True, return_dict_in_generate=True, **settings)
    assert abs(float(found.sequences_scores - wanted.sequences_scores)) < 0.02


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prompt_lookup_num_tokens": 3}, "an assistant or prompt lookup"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
    ],
)
def test_other_caches_are_refused_by_name(checkpoint, settings, named):
    with (
        MoE(checkpoint, kv_dtype="int8") as moe,
        pytest.raises(ConfigError, match=f"kv_dtype='int8' does not go with {named}"),
    ):
        moe.generate(TOKENS[:, :5], max_new_tokens=2, do_sample=False, **settings)


def test_a_cache_of_the_caller_stays_what_it_is(checkpoint):
    with MoE(checkpoint, kv_dtype="int8") as moe:
        cache = DynamicCache(config=moe.model.config)
        moe.generate(TOKENS[:, :5], max_new_tokens=3, do_sample=False, **{CACHE: cache})
        assert cache.layers[0].keys.dtype == torch.float32
        without = moe.generate(TOKENS[:, :5], max_new_tokens=3, do_sample=False, use_cache=False)
        assert without.shape[1] == 8


# what is refused


def test_exact_bits_are_not_those_of_packed_keys(checkpoint):
    for exact in ({"exact": True}, {"experts_implementation": "eager"}):
        with pytest.raises(ConfigError, match="kv_dtype='fp8' changes"):
            MoE(checkpoint, kv_dtype="fp8", **exact)
    with pytest.raises(ConfigError, match="unknown kv_dtype 'int4', expected one of: auto, int8"):
        MoE(checkpoint, kv_dtype="int4")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("switch_transformers", "it has an encoder"),
        ("deepseek_v32", "its cache has a DynamicIndexedLayer"),
    ],
)
def test_models_of_other_caches_are_refused_by_name(kind, reason, tmp_path):
    folder = save_tiny(kind, tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"kv_dtype='int8' .*: {reason}"):
        MoE(folder, kv_dtype="int8")


def test_heads_that_kernels_do_not_read_run_the_modules_own_code(tmp_path):
    saved("Qwen3Moe", tmp_path, head_dim=24)
    with MoE(tmp_path, kv_dtype="int8") as moe:
        found, _ = logits_of(moe.model, "int8")
        reasons = {path.taken.reason for path in moe.report().paths if path.taken.kind == "layer"}
    assert reasons == {"on trial it raised ValueError: heads that kernels do not know"}
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert distance(found, logits_of(stock, "int8")[0]) < NEAR


# memory


@pytest.fixture(scope="module", params=[*KINDS, "gemma4", "deepseek_v2"])
def any_kind(request, tmp_path_factory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.sample(3)
@pytest.mark.parametrize("kv_dtype", ["auto", *KV_DTYPES])
def test_a_cache_takes_the_bytes_that_are_planned(any_kind, kv_dtype):
    with MoE(any_kind, dtype="float32", kv_dtype=kv_dtype) as moe:
        planned = kv_bytes_of(moe.model.config, 4, kv_dtype)
        assert moe.report().kv == planned
        for num_tokens in (20, 90):
            ids = torch.tensor([TEXT[:num_tokens]])
            out = moe.generate(
                ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True,
                eos_token_id=None,
            )  # fmt: skip
            taken = sum(bytes_of_layer(layer) for layer in out[CACHE].layers)
            spare = planned.of(num_tokens + 1) - taken
            # A window of W keeps W - 1 tokens between steps.
            assert 0 <= spare <= planned.per_window_token, (planned, taken)


def bytes_of_layer(layer: Any) -> int:
    keys = getattr(layer, "keys", None)
    return 0 if keys is None else keys.nbytes + layer.values.nbytes


def test_windows_hold_no_memory_of_the_tokens_before_them(any_kind):
    """Stock layers keep a view into all tokens of a prompt until the next step."""
    with MoE(any_kind, dtype="float32") as moe:
        cache = new_cache(moe.model.config, "auto")
        with torch.no_grad():
            for start in (0, 100):
                ids = torch.tensor([TEXT[start : start + 100]])
                moe.model(ids, **{CACHE: cache})
        windows = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
    for layer in windows:
        assert layer.keys.shape[2] == layer.sliding_window - 1 < 100
        for x in (layer.keys, layer.values):
            assert x.untyped_storage().nbytes() == x.nbytes
    kinds = {"gpt_oss", "mixtral", "gemma4"}
    assert bool(windows) == (moe.model.config.model_type.removesuffix("_text") in kinds)


def test_generate_gives_windows_no_more_than_their_memory(checkpoint, monkeypatch):
    """While a prompt is computed, too: layer by layer."""
    if not checkpoint.name.startswith("GptOss"):
        pytest.skip("it has no windows")
    most: list[int] = []
    with MoE(checkpoint, exact=True) as moe:
        forward = type(moe.model).forward

        def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = forward(self, *args, **kwargs)
            layers = kwargs[CACHE].layers
            most.append(max(x.keys.untyped_storage().nbytes() for x in layers if x.is_sliding))
            return out

        monkeypatch.setattr(type(moe.model), "forward", seen)
        moe.generate(TOKENS, max_new_tokens=1, do_sample=False)
    window = moe.model.config.sliding_window
    assert most == [2 * (window - 1) * 16 * 4]


def test_fewer_bytes_are_planned_for_packed_keys(checkpoint):
    needs = {}
    for kv_dtype in ("auto", "int8"):
        with MoE(checkpoint, kv_dtype=kv_dtype, device="cpu") as moe:
            assert moe.engine.room.needs is not None
            needs[kv_dtype] = moe.engine.room.needs
    plain, packed = needs["auto"], needs["int8"]
    share = (16 + SCALE_BYTES) / (16 * 4)
    assert packed.kv.per_token == plain.kv.per_token * share
    assert packed.kv.of(1000) == plain.kv.of(1000) * share
    unpacked = packed.of_pass(100, 1000) - plain.of_pass(100, 1000)
    assert unpacked == 1000 * 2 * 2 * 16 * (4 + 4), "a layer's, in float32 and as the model has it"


@pytest.fixture
def packed(checkpoint) -> Iterator[MoE]:
    with MoE(checkpoint, kv_dtype="int8") as moe:
        yield moe


def test_the_report_says_what_a_token_takes(packed):
    report = packed.report()
    assert report.as_dict()["kv"]["dtype"] == "int8"
    assert "\nkv        int8, " in str(report)
