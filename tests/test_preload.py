"""Free memory fills with experts that nobody has asked for yet: no token depends on it, nothing is
evicted for it, and no answer is lost to it.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.engine.preloader import Preloader
from moe_infinity.errors import ConfigError
from moe_infinity.experts import ExpertKey, Phase
from moe_infinity.memory.mover import Mover
from tests.disk import Disk, Read
from tests.on_demand import ON_DEMAND

pytestmark = pytest.mark.timeout(60)
DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
PROMPT = torch.tensor([[5, 6, 9, 100, 31, 44, 70, 12]])
NUM_EXPERTS = 24


def tokens_of(moe: MoE) -> list[int]:
    mask = torch.ones_like(PROMPT)
    settings = {"do_sample": False, "max_new_tokens": 12}
    ids: list[int] = moe.generate(input_ids=PROMPT, attention_mask=mask, **settings)[0].tolist()
    return ids


@pytest.fixture(scope="module")
def expected(tiny_checkpoint) -> list[int]:
    with MoE(tiny_checkpoint, host_memory="100%", **ON_DEMAND) as moe:
        return tokens_of(moe)


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def preload_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "moe-infinity-fill"]


@pytest.mark.grid
@pytest.mark.parametrize("host_memory", ["5%", "25%", "70%", "100%"])
@pytest.mark.parametrize("preload", ["off", "idle", "wait"])
def test_no_token_depends_on_it(tiny_checkpoint, expected, host_memory, preload):
    options = {"host_memory": host_memory, "preload": preload}
    with MoE(tiny_checkpoint, **options) as moe:
        for _ in range(3):
            assert tokens_of(moe) == expected
            moe.check_invariants()
    with MoE(tiny_checkpoint, prefetch=True, **options) as moe:
        for _ in range(3):
            assert tokens_of(moe) == expected
            moe.check_invariants()


def test_when_all_experts_fit_nothing_misses_after_it(tiny_checkpoint):
    with MoE(tiny_checkpoint, host_memory="100%", preload="wait") as moe:
        tokens_of(moe)
        report = moe.report()
    assert report.prefill.misses + report.prefill.late_hits == 0
    assert report.decode.misses + report.decode.late_hits == 0
    assert report.preload.experts == NUM_EXPERTS
    assert report.bytes_read == report.preload.bytes_read > 0
    assert "preload   24 experts" in str(report)
    assert report.as_dict()["preload"]["experts"] == NUM_EXPERTS


def test_while_nobody_calls_memory_fills_in_the_background(tiny_checkpoint, expected):
    with MoE(tiny_checkpoint, host_memory="100%", preload="idle") as moe:
        wait_until(lambda: len(moe.engine.tiers[0].table.resident_keys()) == NUM_EXPERTS)
        assert moe.is_ready
        assert tokens_of(moe) == expected
        assert moe.report().decode.misses == 0


@pytest.mark.parametrize("host_memory", ["25%", "70%"])
def test_it_takes_free_slots_and_evicts_nothing(tiny_checkpoint, host_memory):
    with MoE(tiny_checkpoint, host_memory=host_memory) as moe:
        tokens_of(moe)
        moe.preload()
        table = moe.engine.tiers[0].table
        before, evictions = set(table.resident_keys()), moe.report().evictions
        moe.preload()
        assert len(table) == table.num_slots
        assert set(table.resident_keys()) == before
        assert moe.report().evictions == evictions
        moe.check_invariants()


def test_what_it_brought_leaves_before_what_decoding_uses(tiny_checkpoint):
    with MoE(tiny_checkpoint, host_memory="70%") as moe:
        moe.preload()
        table = moe.engine.tiers[0].table
        assert all(map(table.is_transient, table.resident_keys()))
        tokens_of(moe)
        kept = [key for key in table.resident_keys() if not table.is_transient(key)]
        absent = next(
            ExpertKey(layer, expert)
            for layer in range(3)
            for expert in range(8)
            if table.lookup(ExpertKey(layer, expert)) is None
        )
        if len(kept) < table.num_slots:
            table.begin_load(absent, Phase.DECODE)
            table.cancel_load(absent)
            assert all(table.lookup(key) is not None for key in kept)


def test_without_knowledge_it_reads_in_the_order_of_the_files(tiny_checkpoint, disk):
    offsets: list[int] = []
    with MoE(tiny_checkpoint, host_memory="100%", num_read_threads=1, **ON_DEMAND) as moe:
        disk.act = lambda read: offsets.append(read.offset)
        moe.preload()
    by_layer = [offsets[at : at + 8] for at in range(0, NUM_EXPERTS, 8)]
    assert all(of_layer == sorted(of_layer) for of_layer in by_layer)


def test_it_reads_first_what_was_used_most(tiny_checkpoint, monkeypatch):
    with MoE(tiny_checkpoint, host_memory="50%", **ON_DEMAND) as moe:
        predictor = moe.engine.predictor
        assert predictor is not None
        likely = [ExpertKey(2, 7), ExpertKey(1, 3), ExpertKey(0, 5)]
        for rank, key in enumerate(likely):
            predictor.base_LE[key] = 0.9 - rank / 10
        begun: list[ExpertKey] = []
        mover = moe.engine.tiers[0].mover
        assert isinstance(mover, Mover)
        preload = mover.preload

        def note(slot_ids: dict[ExpertKey, int], on_end: Callable[[], None]) -> None:
            begun.extend(slot_ids)
            preload(slot_ids, on_end)

        monkeypatch.setattr(mover, "preload", note)
        moe.preload()
    assert begun[:3] == likely
    assert begun[3:] == sorted(begun[3:])


def test_a_failing_disk_is_reported_once_and_costs_no_answer(
    tiny_checkpoint, expected, disk, caplog
):
    disk.fail(lambda read: read.kind == "preload")
    with MoE(tiny_checkpoint, host_memory="100%") as moe:
        with caplog.at_level(logging.WARNING):
            moe.preload()
            assert tokens_of(moe) == expected
        assert disk.failed
        assert caplog.text.count("preloading of experts ends") == 1
        assert "Input/output error" in caplog.text
        moe.check_invariants()


def test_a_layer_that_joins_a_read_that_fails_reads_again(tiny_checkpoint, expected, disk):
    joined = threading.Event()

    def act(read: Read) -> None:
        if read.kind == "preload":
            assert joined.wait(20)
            raise OSError(5, "Input/output error")

    disk.act = act
    with MoE(tiny_checkpoint, host_memory="100%") as moe:
        wait_until(lambda: moe.engine.tiers[0].table.num_loading > 0)
        threading.Timer(0.2, joined.set).start()
        assert tokens_of(moe) == expected
        moe.check_invariants()


def test_a_queued_one_that_a_layer_asks_for_becomes_a_demand_load(tiny_checkpoint, expected, disk):
    go_on = threading.Event()

    def act(read: Read) -> None:
        if read.kind == "preload":
            assert go_on.wait(20)

    disk.act = act
    with MoE(tiny_checkpoint, host_memory="100%", num_read_threads=1) as moe:
        table, mover = moe.engine.tiers[0].table, moe.engine.tiers[0].mover
        wait_until(lambda: table.num_loading > 3)
        with moe.engine.deciding:
            *_, queued = mover._loading
            slot_id = table.slot_of(queued)
            with table.holding([queued], Phase.DECODE):
                counters = moe.engine.bookkeeping.counters.decode
                arrivals = mover.arrivals([queued], counters)
                assert [key for keys in arrivals for key in keys] == [queued]
        assert table.slot_of(queued) == slot_id
        go_on.set()
        assert tokens_of(moe) == expected


def test_closing_meanwhile_leaves_no_thread(tiny_checkpoint, disk):
    disk.act = lambda read: time.sleep(0.05)
    before = set(threading.enumerate())
    with MoE(tiny_checkpoint, host_memory="100%", preload="idle"):
        pass
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive(), thread


@pytest.mark.slow
def test_a_model_that_nobody_closed_is_collected(tiny_checkpoint, disk):
    disk.act = lambda read: time.sleep(0.2)
    moe = MoE(tiny_checkpoint, host_memory="100%", preload="idle")
    assert preload_threads()
    del moe
    gc.collect()
    wait_until(lambda: not preload_threads())


def test_two_models_fill_their_memory_from_one_checkpoint(tiny_checkpoint, expected):
    options = {"host_memory": "100%", "preload": "idle"}
    with MoE(tiny_checkpoint, **options) as one, MoE(tiny_checkpoint, **options) as other:
        assert tokens_of(one) == tokens_of(other) == expected
        for moe in (one, other):
            moe.preload()
            assert moe.report().tiers[0].experts == NUM_EXPERTS


def test_after_an_interrupted_step_it_goes_on(tiny_checkpoint, expected, disk):
    def act(read: Read) -> None:
        if read.kind == "demand":
            raise KeyboardInterrupt

    with MoE(tiny_checkpoint, host_memory="100%", **ON_DEMAND) as moe:
        disk.act = act
        with pytest.raises(KeyboardInterrupt):
            tokens_of(moe)
        disk.mend()
        moe.preload()
        assert moe.report().tiers[0].experts == NUM_EXPERTS
        assert tokens_of(moe) == expected


def test_it_ends_with_whatever_a_read_raises(tiny_checkpoint, expected, disk, caplog):
    """It ended its thread without a word, and who waited for it waited for ever."""

    def act(read: Read) -> None:
        if read.kind == "preload":
            raise KeyboardInterrupt

    disk.act = act
    with MoE(tiny_checkpoint, host_memory="100%", preload="wait") as moe:
        assert tokens_of(moe) == expected
        assert caplog.text.count("preloading of experts ends") == 1
        moe.check_invariants()


def test_it_goes_on_at_the_next_step_after_an_error_of_its_own(
    tiny_checkpoint, expected, monkeypatch, caplog
):
    def fail(preloader: Preloader) -> bool:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Preloader, "advance", fail)
        moe = MoE(tiny_checkpoint, host_memory="100%")
        moe.preload()
    with moe:
        assert tokens_of(moe) == expected
        give_up_at = time.monotonic() + 20
        while moe.report().tiers[0].experts < NUM_EXPERTS:
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
        assert tokens_of(moe) == expected
        moe.check_invariants()
    assert "preloading of experts goes on after MemoryError: no room" in caplog.text


def test_a_step_that_is_cut_short_meanwhile_does_not_hold_it_up(tiny_checkpoint, expected, disk):
    """Until the next step, which waited for it."""
    go_on = threading.Event()

    def act(read: Read) -> None:
        if read.kind == "preload":
            assert go_on.wait(20)
        else:
            raise KeyboardInterrupt

    with MoE(tiny_checkpoint, host_memory="100%", preload="wait") as moe:
        disk.act = act
        with pytest.raises(KeyboardInterrupt):
            moe.model(PROMPT)  # waits for nothing
        disk.mend()
        go_on.set()
        assert tokens_of(moe) == expected
        assert moe.report().tiers[0].experts == NUM_EXPERTS


def test_one_slot_is_left_to_demand_loads(tiny_checkpoint, expected):
    with MoE(tiny_checkpoint, host_memory="5%", preload="wait") as moe:
        assert moe.engine.tiers[0].table.num_slots == 1
        assert tokens_of(moe) == expected
        assert moe.report().preload.experts == 0


def test_an_unknown_value_is_refused(tiny_checkpoint):
    with pytest.raises(ConfigError, match="unknown preload 'always', expected one of: off, idle"):
        MoE(tiny_checkpoint, preload="always")


@pytest.mark.parametrize("preload", ["off", "idle", "wait"])
def test_the_command_line_has_it(command, preload):
    options = ["--max-new-tokens", 4, "--preload", preload, "--report", "--host-memory", "100%"]
    outcome = command("run", DEMO, "-p", "Once", *options)
    assert outcome.code == 0
    if preload == "wait":
        assert "preload" in outcome.err
    if preload == "off":
        assert "preload" not in outcome.err


def test_a_server_is_ready_once_all_slots_are_filled(tiny_checkpoint, disk):
    server = pytest.importorskip("moe_infinity.server.engine")
    go_on = threading.Event()
    disk.act = lambda read: read.kind != "preload" or go_on.wait(20)
    with MoE(tiny_checkpoint, host_memory="100%", preload="wait") as moe:
        engine = server.Engine(moe, server.ServeConfig())
        engine.start()
        try:
            assert engine.is_alive
            assert not engine.is_ready
            go_on.set()
            wait_until(lambda: engine.is_ready)
            assert moe.report().tiers[0].experts == NUM_EXPERTS
        finally:
            engine.close()


def test_a_server_that_is_stopped_does_not_wait_for_it(tiny_checkpoint, disk):
    server = pytest.importorskip("moe_infinity.server.engine")
    go_on = threading.Event()
    disk.act = lambda read: read.kind != "preload" or go_on.wait(20)
    with MoE(tiny_checkpoint, host_memory="100%", preload="wait") as moe:
        engine = server.Engine(moe, server.ServeConfig())
        engine.start()
        began = time.monotonic()
        engine.close()
        assert time.monotonic() - began < 5
        go_on.set()


def test_a_stream_that_is_left_does_not_wait_for_it(tiny_checkpoint, disk):
    go_on = threading.Event()
    disk.act = lambda read: read.kind != "preload" or go_on.wait(20)
    with MoE(tiny_checkpoint, host_memory="100%", preload="wait") as moe:
        stream = moe.stream({"input_ids": PROMPT}, max_new_tokens=3)
        stream._cancelled.set()
        assert list(stream) == []
        go_on.set()


# The next layer of a long prompt


def test_the_next_layer_of_a_long_prompt_is_read_while_one_computes(tiny_checkpoint):
    prompt = torch.arange(3, 99)[None]
    options = {"host_memory": "100%", "preload": "off"}  # only what the prompt itself asks for
    with MoE(tiny_checkpoint, stream_layers=False, **options) as moe:
        logits = moe.model(prompt).logits
        assert moe.report().prefill.misses == NUM_EXPERTS
    with MoE(tiny_checkpoint, stream_layers=True, **options) as moe:
        assert torch.equal(moe.model(prompt).logits, logits)
        prefill = moe.report().prefill
        assert prefill.misses == 8, "of the first layer"
        assert prefill.hits + prefill.late_hits == 16
        moe.check_invariants()


@pytest.mark.parametrize("host_memory", ["5%", "13%", "40%", "70%"])
def test_under_a_limit_it_takes_no_more_than_a_prompt_may(tiny_checkpoint, host_memory):
    prompt = torch.arange(3, 99)[None]
    with MoE(tiny_checkpoint, host_memory="100%", **ON_DEMAND) as moe:
        logits = moe.model(prompt).logits
    with MoE(tiny_checkpoint, host_memory=host_memory) as moe:
        for _ in range(2):
            assert torch.equal(moe.model(prompt).logits, logits)
            tokens_of(moe)
            moe.check_invariants()
