"""Decode steps that the device decides, on a fake device with the reference kernels. They give the
tokens of the host with the same kernels, whatever the budget; the host counts what happened.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.cache.activation_aware import ActivationAware
from moe_infinity.errors import ConfigError
from moe_infinity.gpu import engine
from moe_infinity.gpu.device_steps import DeviceSteps
from moe_infinity.gpu.device_table import DeviceTable
from moe_infinity.gpu.kernels import kernels_for
from moe_infinity.kernels.triton import reference
from moe_infinity.kernels.triton.slot_mlp import SlotMlp
from tests.fake_cuda import FakeCudaDevice, fake_device
from tests.gpu.fast_device import (
    CACHES,
    GRAPHS,
    STATIC,
    experts_of,
    let_the_host_decide,
    on_device,
    tokens_of_the_host,
)
from tests.on_device import (
    LONG_PROMPT,
    PROMPT,
    SOME_POLICIES,
    assert_same_tokens,
    greedy,
)
from tests.quantized_checkpoints import build
from tests.server.driving import Client, generated, make_engine, run_all
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import tiny_model

pytestmark = [pytest.mark.arithmetic, pytest.mark.sample(2)]


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    return tokens_of_the_host(tiny_checkpoint)


@pytest.mark.grid
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("device_memory", ["5%", "30%", "100%"])  # 1, 7, 24
def test_no_budget_changes_a_token(tiny_checkpoint, device_memory, cache):
    expected = tokens_of_the_host(tiny_checkpoint, **cache)
    with on_device(tiny_checkpoint, device_memory) as moe:
        for _ in range(2):
            assert torch.equal(greedy(moe, **cache), expected[0])
            moe.check_invariants()
            assert torch.equal(greedy(moe, LONG_PROMPT, **cache), expected[1])
            moe.check_invariants()
        decode = moe.report().decode
        assert decode.steps == 2 * 2 * 15
        assert decode.lookups == decode.steps * 3 * 2


@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_no_policy_changes_a_token(tiny_checkpoint, expected, policy):
    with on_device(tiny_checkpoint, "30%", policy=policy) as moe:
        assert_same_tokens(moe, expected, rounds=2)
        assert moe.report().decode.hits > 0


def test_a_graph_and_no_graph_give_the_tokens_of_the_host_in_any_order(tiny_checkpoint):
    chances = random.Random(0)
    kinds = [(cache, tokens_of_the_host(tiny_checkpoint, **cache)) for cache in ({}, STATIC)]
    with on_device(tiny_checkpoint, "40%", policy="lru") as moe:
        for _ in range(8):
            (cache, expected), which = chances.choice(kinds), chances.randint(0, 1)
            assert torch.equal(greedy(moe, (PROMPT, LONG_PROMPT)[which], **cache), expected[which])
            moe.check_invariants()


@pytest.mark.parametrize("cache", CACHES)
def test_a_batch_is_decided_by_the_device_too(tiny_checkpoint, cache):
    batch = {
        "input_ids": torch.tensor([[2, 2, 2, 5, 9, 40], [7, 3, 17, 5, 9, 40]]),
        "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
    }
    kwargs = {"max_new_tokens": 8, "do_sample": False}
    found = []
    for device_memory in ("100%", "10%"):
        with on_device(tiny_checkpoint, device_memory) as moe:
            found.append(moe.generate(**batch, **kwargs, **cache).tolist())
            moe.check_invariants()
    assert found[0] == found[1]


@pytest.mark.parametrize("expert_dtype", ["int8", "fp8"])
def test_packed_experts_are_read_as_they_are_stored(tiny_checkpoint, expert_dtype):
    found = []
    for device_memory in ("100%", "10%"):
        with on_device(tiny_checkpoint, device_memory, expert_dtype=expert_dtype) as moe:
            found.append(greedy(moe, num_tokens=8, **STATIC).tolist())
            assert moe.report().decode.steps == 7
            moe.check_invariants()
    assert found[0] == found[1]


def test_the_server_is_given_the_tokens_of_generate(tiny_checkpoint):
    prompts = [[5, 6, 9, 100, 31], [77, 12, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48]]
    with on_device(tiny_checkpoint, "30%") as moe:
        expected = [generated(moe, prompt) for prompt in prompts]
        for max_batch in (1, 3):
            engine = make_engine(moe, max_batch=max_batch)
            clients = [Client(engine, prompt) for prompt in prompts]
            run_all(engine, *clients)
            moe.check_invariants()
            if max_batch == 1:  # attention of a batch rounds differently
                assert [client.token_ids for client in clients] == expected
            assert all(client.error is None for client in clients)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton's interpreter, which reads the memory of a fake device",
)
def test_with_tritons_kernels_no_budget_changes_a_token_either(tiny_checkpoint, monkeypatch):
    pytest.importorskip("triton", reason="needs triton")
    from moe_infinity.gpu.kernels import resolve as triton_resolve

    monkeypatch.setattr(triton_resolve, "FILL_PROGRAMS", 1)  # they run one after the other
    compiled = kernels_for(torch.device("cuda"))
    monkeypatch.setattr(engine, "kernels_for", lambda device: compiled)
    found = []
    for device_memory in ("100%", "10%"):
        with on_device(tiny_checkpoint, device_memory) as moe:
            found.append(greedy(moe, num_tokens=5, **STATIC).tolist())
            moe.check_invariants()
    assert found[0] == found[1]


# What the host knows


def counted(moe: MoE) -> tuple[Any, ...]:
    """What was looked up, and what recorder and policies learned of it."""
    decode = moe.report().decode
    eams = [eam.decode.tolist() for eam in moe.request_eams()]
    scores = [tier.policy.scores().tolist() for tier in moe.engine.tiers]
    return decode.hits, decode.misses, decode.steps, moe.report().evictions, eams, scores


@pytest.mark.parametrize("policy", SOME_POLICIES)
def test_with_room_for_all_the_host_counts_what_the_reference_path_counts(
    tiny_checkpoint, policy, monkeypatch
):
    """The reference path with the same arithmetic, so with the same routing."""
    with on_device(tiny_checkpoint, "100%", policy=policy) as moe:
        greedy(moe)
        greedy(moe, LONG_PROMPT, **STATIC)
        by_device = counted(moe)
    let_the_host_decide(monkeypatch)
    with on_device(tiny_checkpoint, "100%", policy=policy) as moe:
        greedy(moe)
        greedy(moe, LONG_PROMPT, **STATIC)
        assert counted(moe) == by_device


def test_scores_are_those_after_each_part_of_the_layers(tiny_checkpoint, monkeypatch):
    asked: list[int] = []
    uploaded: list[tuple[Any, int]] = []
    scores_after, upload = ActivationAware.scores_after, DeviceTable.upload_scores

    def asking(self: ActivationAware, moe_layer_idx: int) -> Any:
        asked.append(moe_layer_idx)
        return scores_after(self, moe_layer_idx)

    def uploading(self: DeviceTable, scores_LHE: Any, first_layer: int) -> None:
        uploaded.append((scores_LHE.copy(), first_layer))
        upload(self, scores_LHE, first_layer)

    monkeypatch.setattr(DeviceTable, "upload_scores", uploading)
    with on_device(tiny_checkpoint, "30%") as moe:
        greedy(moe)
        monkeypatch.setattr(ActivationAware, "scores_after", asking)
        uploaded.clear()
        policy = moe.engine.tiers[0].policy
        assert isinstance(policy, ActivationAware)
        moe.engine.tiers[0].table._transient[:] = False  # their scores are lower
        steps = experts_of(moe).device_steps
        for moe_layer_idx in (None, 0, 1, 2):
            steps.poller.upload_scores(moe_layer_idx)
        assert asked == 4 * [0, 2]
        (whole, first_layer), *layers = uploaded
        assert first_layer == 0
        after = [policy.scores_after(0), policy.scores_after(2)]
        assert (whole.transpose(1, 0, 2) == after).all()
        assert (whole[:, 0] != whole[:, 1]).any()
        for (scores, first_layer), expected, moe_layer_idx in zip(
            layers, whole, range(3), strict=True
        ):
            assert first_layer == moe_layer_idx
            assert (scores == expected).all()


def test_a_recording_has_every_token(tiny_checkpoint):
    with on_device(tiny_checkpoint, "30%") as moe, moe.recording() as finish:
        greedy(moe, **STATIC)
        (trace,) = finish()
        assert len(trace.experts_TLK) == len(PROMPT[0]) + 15


def test_the_device_decides_once_host_has_all_experts(tiny_checkpoint, monkeypatch):
    """In the background, and whatever the host has decided before."""
    decided: list[bool] = []
    begin = DeviceSteps.begin_step

    def watched(self: DeviceSteps, step: Any) -> bool:
        decided.append(begin(self, step))
        return decided[-1]

    monkeypatch.setattr(DeviceSteps, "begin_step", watched)
    options = {"device_memory": "30%", "preload": "idle", **GRAPHS}
    expected = tokens_of_the_host(tiny_checkpoint)
    with fake_device(FakeCudaDevice()), MoE(tiny_checkpoint, options) as moe:
        until = time.monotonic() + 60
        while not any(decided):
            assert torch.equal(greedy(moe), expected[0])
            assert time.monotonic() < until
        assert moe.engine.is_preloaded
        assert_same_tokens(moe, expected)


@pytest.mark.parametrize(
    ("is_locking", "options"),
    [(False, {}), (True, {"host_memory": "60%"}), (True, {"prefetch": True})],
    ids=["no page-locked memory", "a small host", "prefetches"],
)
def test_the_host_decides_where_the_device_cannot_and_no_token_changes(
    tiny_checkpoint, monkeypatch, is_locking, options
):
    expected = tokens_of_the_host(tiny_checkpoint)
    options = {"device_memory": "30%", **GRAPHS, **options}
    cuda_device = FakeCudaDevice(is_locking=is_locking)
    decided: list[Any] = []
    monkeypatch.setattr(DeviceSteps, "run_layer", lambda *given: decided.append(given))
    with fake_device(cuda_device), MoE(tiny_checkpoint, options) as moe:
        moe.preload()
        assert_same_tokens(moe, expected)
        assert not decided
        assert moe.report().decode.hits < moe.report().decode.lookups


def refused(folder: Any, cuda_device: FakeCudaDevice | None = None, **options: Any) -> str:
    """What is said of options that it cannot work with."""
    budgets = {"device_memory": "30%"} if cuda_device is not None else {"device": "cpu"}
    with ExitStack() as doubles:
        if cuda_device is not None:
            doubles.enter_context(fake_device(cuda_device))
        with pytest.raises(ConfigError, match="\nhint: gpu_engine='auto'") as error:
            MoE(folder, **budgets, **GRAPHS | options)
    return str(error.value)


def test_what_it_cannot_work_with_is_an_error_with_a_hint(tiny_checkpoint, tmp_path):
    assert "there is no CUDA GPU" in refused(tiny_checkpoint)
    device = FakeCudaDevice
    assert "ask routers early" in refused(
        tiny_checkpoint, device(), early_router=True, prefetch=True
    )
    assert "its results are not exact" in refused(tiny_checkpoint, device(), exact=True)
    assert "packed keys and values" in refused(tiny_checkpoint, device(), kv_dtype="int8")
    tiny_model(architectures_in("dbrx")[-1]).save_pretrained(tmp_path)
    assert "more than an activation between two products" in refused(tmp_path, device())


def test_a_gpu_has_graphs_where_the_model_allows_it(tiny_checkpoint, monkeypatch):
    """By default. Else, as without kernels that agree with torch, the host decides."""

    def is_driven_by_graphs(**options: Any) -> bool:
        with fake_device(FakeCudaDevice()), MoE(tiny_checkpoint, options) as moe:
            return isinstance(moe._experts, engine.DeviceExperts)

    assert not is_driven_by_graphs()
    monkeypatch.setattr(engine, "has_graphs", lambda device: True)
    assert is_driven_by_graphs()
    assert is_driven_by_graphs(expert_dtype="int8")  # its kernels are tried, too
    assert is_driven_by_graphs(host_memory="40%")
    assert is_driven_by_graphs(prefetch=True)
    assert not is_driven_by_graphs(exact=True)
    assert not is_driven_by_graphs(kv_dtype="int8")
    assert not is_driven_by_graphs(gpu_engine="host")
    monkeypatch.setattr(engine, "disagreement", lambda *_, **__: "it is far away")
    assert not is_driven_by_graphs()


@pytest.mark.parametrize("name", ["fp8", "int4 symmetric", "mxfp4"])
def test_kernels_that_read_packed_experts_wrongly_are_found_out(name, tmp_path, monkeypatch):
    """By a trial with experts of the checkpoint, when it is loaded."""
    folder = build(name, tmp_path)
    compute_pairs = reference.compute_pairs

    def one_row_is_wrong(mlp: SlotMlp, *given: Any) -> None:
        compute_pairs(mlp, *given)
        given[-1][:, 0] += 1

    monkeypatch.setattr(reference, "compute_pairs", one_row_is_wrong)
    assert "away from torch" in refused(folder, FakeCudaDevice())
