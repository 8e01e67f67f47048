"""When a decode step is captured, and what its graph depends on, with graphs that a CPU records."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import DynamicCache

from moe_infinity.gpu import graphed_step
from moe_infinity.memory.cuda import CAPTURING, TorchCudaDevice
from tests.cache_name import CACHE
from tests.gpu.fast_device import STATIC, experts_of, on_device, tokens_of_the_host
from tests.gpu.recorded_graph import tokens_without_graph
from tests.on_device import PROMPT, assert_same_tokens, greedy
from tests.sweep.discover import architectures_in
from tests.sweep.tiny import tiny_model

pytestmark = pytest.mark.arithmetic


@pytest.fixture
def cuda_stream(monkeypatch) -> Any:
    """Of a device whose calls do nothing, for `capture` itself."""
    for name in ("device", "current_stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: nullcontext())
    for name in ("CUDAGraph", "graph_pool_handle", "Stream", "empty_cache", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, mock.Mock())
    return SimpleNamespace(device=torch.device("cuda", 1))


def test_a_number_of_sequences_is_captured_once_for_all_requests(tiny_checkpoint, graphs):
    expected = tokens_without_graph(tiny_checkpoint)
    batch = torch.cat([PROMPT, PROMPT])
    with on_device(tiny_checkpoint, "30%") as moe:
        greedy(moe, num_tokens=2)  # one decode step
        assert not graphs
        for _ in range(2):  # whatever cache came before
            assert_same_tokens(moe, expected)
            assert experts_of(moe).graphed.has_graph
            assert len(graphs) == 1
        two = greedy(moe, batch)
        assert len(graphs) == 2
        assert torch.equal(greedy(moe, batch), two)
        assert_same_tokens(moe, expected)
        assert len(graphs) == 2


def test_a_graph_keeps_no_request_in_memory(tiny_checkpoint, graphs):
    with on_device(tiny_checkpoint, "100%") as moe:
        cache = DynamicCache(config=moe.model.config)
        greedy(moe, **{CACHE: cache})
        assert graphs
        keys = weakref.ref(cache.layers[0].keys)
        del cache
        gc.collect()
        assert keys() is None


def test_another_cache_runs_kernel_by_kernel(tiny_checkpoint, graphs):
    with on_device(tiny_checkpoint, "100%") as moe:
        greedy(moe, **STATIC)
        assert not experts_of(moe).graphed.has_graph
        assert moe.report().decode.lookups
    assert not graphs


def test_a_capture_is_on_the_stream_of_its_model(tiny_checkpoint, graphs, monkeypatch):
    streams: list[object] = []
    record: Any = vars(graphed_step)["capture"]

    def capture(stream: object, run: Any) -> Any:
        streams.append(stream)
        return record(None, run)

    stream = object()
    monkeypatch.setattr(graphed_step, "new_stream", lambda device: stream)
    monkeypatch.setattr(graphed_step, "capture", capture)
    with on_device(tiny_checkpoint, "100%") as moe:
        greedy(moe)
        assert experts_of(moe).graphed.has_graph
    assert streams == [stream]


def test_other_arguments_are_another_graph(tiny_checkpoint, graphs):
    with on_device(tiny_checkpoint, "100%") as moe:
        for more in ({}, {"output_hidden_states": True, "return_dict_in_generate": True}):
            out = moe.generate(input_ids=PROMPT, max_new_tokens=8, do_sample=False, **more)
        assert len(graphs) == 2
        first, second = out.hidden_states[4][1], out.hidden_states[5][1]
        assert not torch.equal(first, second)  # not the same memory


def test_a_model_that_asks_how_long_the_cache_is_is_not_captured(tmp_path, graphs, caplog):
    """A graph would keep the answer."""
    tiny_model(architectures_in("llama4")[-1]).save_pretrained(tmp_path)
    with on_device(tmp_path, "100%") as moe:
        greedy(moe)
        assert not experts_of(moe).graphed.has_graph
    assert "no CUDA graph" in caplog.text


def test_a_capture_that_fails_is_logged_once_and_changes_no_token(
    tiny_checkpoint, monkeypatch, caplog
):
    def capture(stream: Any, run: Any) -> Any:
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    expected = tokens_of_the_host(tiny_checkpoint)
    monkeypatch.setattr(graphed_step, "has_graphs", lambda device: True)
    monkeypatch.setattr(graphed_step, "capture", capture)
    with on_device(tiny_checkpoint, "30%") as moe:
        for _ in range(2):
            assert torch.equal(greedy(moe), expected[0])
    logged = [record for record in caplog.records if "no CUDA graph" in record.message]
    assert len(logged) == 1
    assert "not permitted when stream is capturing" in logged[0].message


@pytest.mark.parametrize("is_invalidated", [True, False])
def test_a_capture_that_fails_leaves_the_current_stream_and_no_pool(monkeypatch, is_invalidated):
    """As torch.cuda.graph does not if ending the capture raises."""
    streams, pools, released = ["compute"], {"others"}, []
    of_the_model: Any = SimpleNamespace(device=torch.device("cuda", 1))

    class Graph:
        def __init__(self, graph: object, pool: str, stream: str, mode: str) -> None:
            assert (stream, mode) == (of_the_model, "thread_local")
            self._pool = pool

        def __enter__(self) -> None:
            streams.append("its own")
            pools.add(self._pool)

        def __exit__(self, *args: object) -> None:
            if is_invalidated:
                raise RuntimeError("capture was invalidated")
            pools.remove(self._pool)

    def end(device: int, pool: str) -> None:
        assert device == 1
        if pool not in pools:
            raise RuntimeError("not currently recording")
        pools.remove(pool)

    def run() -> None:
        assert not gc.isenabled()
        raise RuntimeError("a size that the device says")

    @contextmanager
    def stream(current: str) -> Iterator[None]:
        try:
            yield
        finally:
            streams.append(current)

    for name, stand_in in {
        "CUDAGraph": object,
        "device": lambda device: nullcontext(),
        "current_stream": lambda device: streams[-1],
        "stream": stream,
        "graph": Graph,
        "graph_pool_handle": lambda: "the graph's",
    }.items():
        assert hasattr(torch.cuda, name), name
        monkeypatch.setattr(torch.cuda, name, stand_in)
    generator = mock.Mock(**{"clone_state.return_value": "as new"})
    monkeypatch.setattr(torch.cuda, "default_generators", [None, generator])
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *pool: released.append(pool))
    with pytest.raises(RuntimeError, match="invalidated" if is_invalidated else "a size"):
        graphed_step.capture(of_the_model, run)
    assert gc.isenabled()
    assert streams[-1] == "compute"
    assert pools == {"others"}
    assert released == ([(1, "the graph's")] if is_invalidated else [])
    left = [mock.call("as new")] if is_invalidated else []
    assert generator.graphsafe_set_state.mock_calls == left


def test_ctrl_c_in_a_capture_is_not_lost_where_torch_has_other_names(cuda_stream, monkeypatch):
    def run() -> None:
        raise KeyboardInterrupt

    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool", raising=False)
    with pytest.raises(KeyboardInterrupt):
        graphed_step.capture(cuda_stream, run)


def test_captures_and_waits_for_a_device_take_turns(cuda_stream, monkeypatch):
    """Either would end the other; and two captures would leave nobody to collect again."""
    monkeypatch.setattr("moe_infinity.memory.cuda.CAPTURE_SECONDS", 5.0)
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("waited"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("emptied"))
    cuda_device = TorchCudaDevice(cuda_stream.device)
    seen.clear()
    others: list[Any] = [
        lambda: TorchCudaDevice(cuda_stream.device),
        cuda_device.synchronize,
        lambda: graphed_step.capture(cuda_stream, lambda: seen.append("captured")),
    ]

    def run() -> None:
        for thread in threads:
            thread.start()
            thread.join(0.1)  # they do not get far
        cuda_device.synchronize()  # which CUDA would refuse, but nothing hangs
        assert seen.pop() == "waited"
        seen.append("begun before")

    threads = [threading.Thread(target=other) for other in others]
    graphed_step.capture(cuda_stream, run)
    for thread in threads:
        thread.join(10)
    assert seen[0] == "begun before"
    assert sorted(seen[1:]) == ["captured", "emptied", "waited"]
    assert gc.isenabled()


def test_a_wait_for_a_device_does_not_wait_for_ever_for_a_capture(cuda_stream, monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append("waited"))
    monkeypatch.setattr("moe_infinity.memory.cuda.CAPTURE_SECONDS", 0.05)
    cuda_device = TorchCudaDevice(cuda_stream.device)
    waiting = threading.Thread(target=cuda_device.synchronize)
    with CAPTURING:
        waiting.start()
        waiting.join(10)
        assert seen == ["waited"]
    cuda_device.synchronize()
    assert CAPTURING.acquire(timeout=1)
    CAPTURING.release()


def test_a_graph_is_replayed_and_gives_what_the_capture_gave(cuda_stream):
    graph: Any = torch.cuda.CUDAGraph()  # there is one of them
    replay = graphed_step.capture(cuda_stream, lambda: "logits")
    assert not graph.replay.called
    assert replay() == replay() == "logits"
    assert graph.replay.call_count == 2


def test_every_model_captures_on_a_stream_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: mock.Mock(device=device))
    device = torch.device("cuda", 1)
    one, other = graphed_step.new_stream(device), graphed_step.new_stream(device)
    assert one is not None
    assert one is not other
    assert one.device == device


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_as_before_after_a_capture(cuda_stream, collects):
    try:
        if not collects:
            gc.disable()
        assert graphed_step.capture(cuda_stream, gc.isenabled)() is False  # within it
        assert gc.isenabled() is collects
    finally:
        gc.enable()


def test_closing_gives_the_models_own_forward_back(tiny_checkpoint):
    with on_device(tiny_checkpoint, "30%") as moe:
        assert "forward" in vars(moe.model)
    assert "forward" not in vars(moe.model)
