"""A request copies what is known of its prompt, and its answer is the one it gets without."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers.cache_utils import DynamicCache

from moe_infinity import MoE
from moe_infinity.errors import ConfigError
from moe_infinity.prefixes.cache_bytes import CacheBytes
from moe_infinity.prefixes.continuing import why_not
from moe_infinity.prefixes.prefix_cache import PrefixCache
from moe_infinity.prefixes.prefix_tree import BLOCK, LEAST_BLOCK_BYTES
from tests.server.driving import Client, answered, assert_same_answer, cached, make_engine, run_all
from tests.server.serving import serving
from tests.sweep import tiny
from tests.sweep.discover import architectures_in

pytestmark = pytest.mark.arithmetic

TEXT = [(7 * at * at + at) % 120 + 3 for at in range(200)]


# answers


def test_a_conversation_that_grows_computes_only_what_is_new(moe):
    engine = make_engine(moe, max_batch=2, prefix_cache="64MiB", prefill_chunk=24)
    without = make_engine(moe, max_batch=2, prefix_cache="off", prefill_chunk=24)
    prompt = TEXT[:40]
    known = 0
    for turn in range(4):
        found, expected = (answered(each, prompt) for each in (engine, without))
        assert_same_answer(found, expected)
        assert cached(expected) == 0
        assert cached(found) == known // BLOCK * BLOCK
        # The last token of an answer is chosen, and no pass has got it yet.
        known = len(prompt) + len(found.token_ids) - 1
        prompt = [*prompt, *found.token_ids, *TEXT[50 + 20 * turn :][:17]]
    state = engine.state()
    assert state["cached_tokens"] > 100
    assert state["prefix_bytes"] > 0


def test_the_last_token_of_a_known_prompt_is_computed(moe):
    engine = make_engine(moe, max_batch=2, prefix_cache="64MiB")
    prompt = TEXT[: 3 * BLOCK]
    first, again = (answered(engine, prompt) for _ in range(2))
    assert [cached(first), cached(again)] == [0, 2 * BLOCK]
    assert_same_answer(again, first)


def test_a_running_sequence_shares_its_prompt(moe):
    engine = make_engine(moe, max_batch=4, prefix_cache="64MiB")
    clients = [Client(engine, TEXT[:50]) for _ in range(3)]
    run_all(engine, *clients)
    assert [cached(client) for client in clients] == [0, 48, 48]
    for client in clients[1:]:
        assert_same_answer(client, clients[0])


def test_choices_and_prompts_of_one_request_compute_what_they_share_once(moe):
    """By usage, where a prompt counts once, and by the engine's counts, where each choice does."""
    shared, whole = TEXT[:50], 50 // BLOCK * BLOCK
    with serving(moe, max_batch=4, prefix_cache="64MiB") as server, server.client() as client:

        def asked(**wishes: Any) -> tuple[int, int, int]:
            before = server.engine.state()
            usage = client.completions.create(model="tiny", max_tokens=2, **wishes).usage
            state = server.engine.state()
            names = ("prompt_tokens", "cached_tokens")
            whole, cached = (state[name] - before[name] for name in names)
            return usage.prompt_tokens_details.cached_tokens, whole - cached, cached

        rest = len(shared) - whole  # the last block is not full
        assert asked(prompt=shared, n=4) == (0, len(shared) + 3 * rest, 3 * whole)
        prompts = [[*shared[::-1], 3 + at] for at in range(3)]
        rest = len(prompts[0]) - whole
        assert asked(prompt=prompts) == (2 * whole, len(prompts[0]) + 2 * rest, 2 * whole)


def test_owners_do_not_share(moe):
    engine = make_engine(moe, max_batch=2, prefix_cache="64MiB")
    shares = [
        cached(answered(engine, TEXT[:40], owner=owner)) for owner in ("a", "b", "a", "b", "")
    ]
    assert shares == [0, 0, 32, 32, 0]


def test_a_wrong_block_changes_the_answer(moe, monkeypatch):
    """The comparisons above can fail."""
    engine = make_engine(moe, max_batch=2, prefix_cache="64MiB")
    expected = answered(engine, TEXT[:60])
    find = PrefixCache.find
    monkeypatch.setattr(PrefixCache, "find", lambda *args: 3 * find(*args)[:1])
    found = answered(engine, TEXT[:60])
    assert cached(found) == 48
    with pytest.raises(AssertionError):
        assert_same_answer(found, expected)


def test_the_eam_of_a_request_is_that_of_all_its_tokens(moe):
    eams = []
    for size in ("off", "64MiB"):
        engine = make_engine(moe, max_batch=1, prefix_cache=size)
        for _ in range(2):
            client = answered(engine, TEXT[:70])
        eams.append(moe.request_eams()[0])
    assert cached(client) == 64
    np.testing.assert_array_equal(eams[0].prefill, eams[1].prefill)
    np.testing.assert_array_equal(eams[0].decode, eams[1].decode)


# models


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", "mixtral"])
def test_sliding_windows_and_latent_attention(name, tmp_path, monkeypatch):
    """gpt-oss has windows in every other layer; DeepSeek's keys and values differ in width."""
    monkeypatch.setitem(tiny.SIZES, "sliding_window", 20)
    tiny.tiny_model(architectures_in(name)[0]).save_pretrained(tmp_path)
    with MoE(tmp_path, dtype="float32") as moe:
        moe.tokenizer = letters()
        with_cache = make_engine(moe, max_batch=2, prefix_cache="16MiB", prefill_chunk=24)
        without = make_engine(moe, max_batch=2, prefix_cache="off", prefill_chunk=24)
        prompt = [token % 90 for token in TEXT[5:75]]
        answered(with_cache, prompt[:50])
        found, expected = (answered(engine, prompt) for engine in (with_cache, without))
        assert cached(found) >= 48
        assert_same_answer(found, expected)


def letters() -> Any:
    class Letters:
        def decode(self, ids: list[int], **settings: Any) -> str:
            return "".join(chr(97 + token % 26) for token in ids)

        def convert_ids_to_tokens(self, token_id: int) -> str:
            return self.decode([token_id])

    return Letters()


def test_what_cannot_be_kept_is_said_and_refused(tmp_path, caplog):
    """Jamba begins anew with every pass of several tokens."""
    tiny.tiny_model(architectures_in("jamba")[0]).save_pretrained(tmp_path)
    with MoE(tmp_path, dtype="float32") as moe:
        moe.tokenizer = letters()
        with caplog.at_level(logging.INFO):
            engine = make_engine(moe, max_batch=1)
        assert "no prefixes are kept: a prompt in two passes has other logits" in caplog.text
        assert engine.state()["prefix_bytes"] == 0
        with pytest.raises(ConfigError, match="prefixes of this model cannot be kept"):
            make_engine(moe, max_batch=1, prefix_cache="1GiB")


def test_caches_of_other_layers_cannot_be_kept():
    model = tiny.tiny_model(architectures_in("deepseek_v32")[0])
    assert "no part can be copied" in (why_not(model.config) or "")


@pytest.mark.parametrize("is_exact", [False, True])
def test_with_one_seat_and_exact_nothing_is_kept_unless_asked_for(tiny_checkpoint, is_exact):
    with MoE(tiny_checkpoint, exact=is_exact) as moe:
        sizes = [
            make_engine(moe, **options)._passes.prefixes.num_bytes > 0
            for options in (
                {"max_batch": 1},
                {"max_batch": 2},
                {"max_batch": 1, "prefix_cache": "1MB"},
            )
        ]
    assert sizes == [not is_exact, True, True]


# blocks


def cache_of(tokens: list[int]) -> DynamicCache:
    """Keys and values that say which token they are of."""
    cache = DynamicCache()
    x = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)
    for layer_idx in range(2):
        cache.update(x + layer_idx, x.repeat(1, 2, 1, 3) - layer_idx, layer_idx)
    return cache


BLOCK_BYTES = 2 * (1 + 6) * 4 * BLOCK  # of the cache above


def add(prefixes: PrefixCache, tokens: list[int], owner: str = "") -> None:
    branch = prefixes.branch(owner)
    prefixes.find(branch, tokens)
    prefixes.extend(branch, tokens, cache_of(tokens), 0, len(tokens))


def found(prefixes: PrefixCache, tokens: list[int], owner: str = "") -> list[int]:
    """The tokens whose keys and values are there."""
    branch = prefixes.branch(owner)
    nodes = prefixes.find(branch, tokens)
    assert branch.num_tokens == len(nodes) * BLOCK
    if not nodes:
        return []
    cache = DynamicCache()
    for _ in range(2):
        cache.layers.append(cache.layer_class_to_replicate())
    prefixes.fill(cache, nodes, torch.device("cpu"))
    (first, second) = cache.layers
    assert torch.equal(first.keys + 1, second.keys)
    assert torch.equal(first.values - 1, second.values)
    assert torch.equal(first.values[0, 1, :, 2], first.keys[0, 0, :, 0])
    assert cache.get_seq_length() == branch.num_tokens
    return first.keys.flatten().int().tolist()


def test_whole_blocks_of_the_longest_prefix_are_found():
    prefixes = PrefixCache(100 * BLOCK_BYTES)
    add(prefixes, TEXT[:50])
    add(prefixes, [*TEXT[:20], *TEXT[100:140]])
    assert found(prefixes, TEXT[:50]) == TEXT[:48]
    assert found(prefixes, TEXT[:47]) == TEXT[:32]
    assert found(prefixes, [*TEXT[:20], *TEXT[100:140]]) == [*TEXT[:20], *TEXT[100:128]]
    assert found(prefixes, TEXT[1:60]) == []
    assert prefixes.used_bytes == 5 * BLOCK_BYTES  # the first block is shared


def test_the_least_recently_used_goes_first_and_never_from_the_middle():
    prefixes = PrefixCache(6 * BLOCK_BYTES)
    one, two, three = ([*[start] * BLOCK, *TEXT[: 2 * BLOCK]] for start in (1, 2, 3))
    add(prefixes, one)
    add(prefixes, two)
    assert found(prefixes, one) == one
    add(prefixes, three[: 2 * BLOCK])  # two loses its last two blocks
    assert found(prefixes, one) == one
    assert found(prefixes, two) == two[:BLOCK]
    assert found(prefixes, three) == three[: 2 * BLOCK]
    assert prefixes.used_bytes == 6 * BLOCK_BYTES


def test_room_is_made_before_a_cache_is_filled():
    wanted: list[int] = []
    prefixes = PrefixCache(6 * BLOCK_BYTES, make_room=wanted.append)
    add(prefixes, TEXT[: 3 * BLOCK])
    assert wanted == [2 * 3 * BLOCK_BYTES], "the blocks, and what they are cut from"
    wanted.clear()
    assert found(prefixes, TEXT[: 2 * BLOCK + 5]) == TEXT[: 2 * BLOCK]
    assert wanted == [2 * 2 * BLOCK_BYTES], "its pieces, and what they are put together to"


def test_one_branch_may_fill_it_and_more_is_left_out():
    prefixes = PrefixCache(3 * BLOCK_BYTES)
    add(prefixes, TEXT)
    assert found(prefixes, TEXT) == TEXT[: 3 * BLOCK]
    add(prefixes, TEXT[100:])
    assert found(prefixes, TEXT[100:]) == TEXT[100 : 100 + 3 * BLOCK]


def test_too_little_memory_is_said(caplog):
    prefixes = PrefixCache(BLOCK_BYTES - 1)
    add(prefixes, TEXT)
    assert f"of {BLOCK_BYTES} bytes does not fit" in caplog.text
    assert found(prefixes, TEXT) == []


@pytest.mark.parametrize("num_layers", [0, 2])
def test_blocks_without_bytes_are_bounded_by_memory_too(num_layers):
    num_bytes = 4 * LEAST_BLOCK_BYTES
    prefixes = PrefixCache(num_bytes)
    cache = DynamicCache()
    for layer_idx in range(num_layers):
        nothing = torch.empty(1, 1, len(TEXT), 0)
        cache.update(nothing, nothing, layer_idx)
    branch = prefixes.branch("")
    prefixes.extend(branch, TEXT, cache, 0, len(TEXT))
    assert len(prefixes._kept) == 4
    assert prefixes.used_bytes == num_bytes


def test_a_block_keeps_the_experts_of_no_other_in_memory():
    prefixes = PrefixCache(100 * BLOCK_BYTES)
    branch = prefixes.branch("")
    experts_TLK = np.arange(len(TEXT) * 6).reshape(len(TEXT), 3, 2)
    for chunk in (experts_TLK[:50], experts_TLK[50:]):
        branch.note(chunk)
    prefixes.extend(branch, TEXT, cache_of(TEXT), 0, len(TEXT))
    blocks = prefixes.find(prefixes.branch(""), TEXT)
    assert len(blocks) == len(TEXT) // BLOCK
    kept = [block.experts for block in blocks if block.experts is not None]
    assert np.array_equal(np.concatenate(kept), experts_TLK[: 12 * BLOCK])
    assert all(experts.base is None for experts in kept)


def test_a_branch_that_was_dropped_meanwhile_grows_no_more():
    prefixes = PrefixCache(2 * BLOCK_BYTES)
    branch = prefixes.branch("")
    prefixes.extend(branch, TEXT, cache_of(TEXT[:16]), 0, 16)
    add(prefixes, TEXT[50 : 50 + 2 * BLOCK])
    prefixes.extend(branch, TEXT, cache_of(TEXT[:48]), 0, 48)
    assert found(prefixes, TEXT) == []
    assert found(prefixes, TEXT[50:]) == TEXT[50 : 50 + 2 * BLOCK]


def test_any_order_of_uses_keeps_what_was_used_last():
    chance = random.Random(0)
    prefixes = PrefixCache(12 * BLOCK_BYTES)
    texts = [
        [*TEXT[: BLOCK * chance.randrange(3)], *chance.choices(range(100), k=40)] for _ in range(9)
    ]
    for _ in range(300):
        text, owner = chance.choice(texts), chance.choice("ab")
        add(prefixes, text, owner)
        whole = len(text) // BLOCK * BLOCK
        assert found(prefixes, text, owner) == text[:whole]
        assert prefixes.used_bytes <= prefixes.num_bytes


# memory


def test_a_prompt_gets_the_memory_of_prefixes_where_no_other_is_left(moe, monkeypatch):
    """It was refused for good, once they had filled what was free at the start."""
    engine = make_engine(moe, max_batch=2, prefix_cache="64MiB")
    answered(engine, TEXT[:60])
    prefixes = engine._passes.prefixes
    at_once = moe.engine.room.tokens_at_once

    def where_none_is_left(*args: Any, **kwargs: Any) -> int:
        return 0 if prefixes.used_bytes else at_once(*args, **kwargs)

    assert prefixes.used_bytes > 0
    monkeypatch.setattr(moe.engine.room, "tokens_at_once", where_none_is_left)
    client = answered(engine, TEXT[60:130])
    assert (client.error, len(client.token_ids)) == (None, 12)
    monkeypatch.setattr(moe.engine.room, "tokens_at_once", lambda *_, **__: 0)
    client = Client(engine, TEXT[20:90])
    run_all(engine, client)
    assert "no memory for this prompt" in str(client.error)


def test_an_answer_gets_it_before_it_is_cut(moe, monkeypatch):
    engine = make_engine(moe, max_batch=2, prefix_cache="64MiB")
    prefixes = engine._passes.prefixes
    given: list[bool] = []

    def give_way() -> bool:
        given.append(True)
        return len(given) == 1

    monkeypatch.setattr(prefixes, "give_way", give_way)
    room = moe.engine.room
    monkeypatch.setattr(room, "has_room", lambda *_, **__: bool(given))
    client = answered(engine, TEXT[:30], max_new_tokens=40)
    assert (given, len(client.token_ids)) == ([True], 40)
    given.clear()
    monkeypatch.setattr(room, "has_room", lambda *_, **__: False)
    client = answered(engine, TEXT[:30], max_new_tokens=40)
    assert len(client.token_ids) < 40, "that was not enough"


def test_a_full_cache_copies_nothing_in_decode_steps(moe, monkeypatch):
    """It made blocks of all that was behind the last in each step, 64 MiB of them."""
    made = []
    blocks = CacheBytes.blocks

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(kwargs["num_blocks"])
        return blocks(*args, **kwargs)

    monkeypatch.setattr(CacheBytes, "blocks", noted)
    engine = make_engine(moe, max_batch=2, prefix_cache="16KiB")
    client = answered(engine, TEXT[:100], max_new_tokens=40)
    assert len(client.token_ids) == 40
    assert 0 < engine.state()["prefix_bytes"] <= 16 << 10
    assert made == [100 // BLOCK]


def test_what_is_known_of_a_prompt_counts_for_no_client(moe):
    engine = make_engine(moe, max_batch=2, prefix_cache="64MiB")
    for expected in (60, 60 + 12):
        answered(engine, TEXT[:60], client="a", max_new_tokens=1)
        assert engine._prefilling._shares._num_computed["a"] == expected
