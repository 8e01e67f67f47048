"""A model with a DEVICE tier, on a fake device that copies as late as it may: the tokens of the run
without one, whatever the budgets, and no slot read or overwritten too early."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.fake_link import FakeLink, RealClock, fake_device
from moe_infinity import MoE
from moe_infinity.cache.policies import POLICIES, PREDICTING
from moe_infinity.errors import CheckpointError, ConfigError, OutOfMemory
from moe_infinity.memory.device import RING_BUFFERS, DeviceSlots, SourceSlots
from moe_infinity.memory.device_mover import DeviceMover
from moe_infinity.memory.link import Copy, Event
from moe_infinity.memory.reader import Reader
from moe_infinity.models.computing import RowComputer

PROMPT = torch.tensor([[3, 17, 5, 9, 40, 2, 77, 31]])
LONG_PROMPT = (torch.arange(3, 99) * 7 % 125 + 3)[None]
BUDGETS = ["5%", "30%", "100%"]  # of 24 experts: 1, 7, 24 slots


def greedy(moe: Any, prompt: Tensor = PROMPT, num_tokens: int = 16, **kwargs: Any) -> Tensor:
    ids: Tensor = moe.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        do_sample=False,
        **kwargs,
    )
    return ids


@pytest.fixture(scope="module")
def expected(tiny_checkpoint):
    """Tokens of a run on the CPU, of the short and the long prompt."""
    with MoE(tiny_checkpoint) as moe:
        return greedy(moe), greedy(moe, LONG_PROMPT)


def assert_same_tokens(moe: MoE, expected: tuple[Tensor, Tensor], rounds: int = 1) -> None:
    for _ in range(rounds):
        for prompt, tokens in zip((PROMPT, LONG_PROMPT), expected, strict=True):
            assert torch.equal(greedy(moe, prompt), tokens)
            moe.check_invariants()


@pytest.mark.parametrize("host_memory", BUDGETS)
@pytest.mark.parametrize("device_memory", BUDGETS)
def test_no_budget_of_either_tier_changes_a_token(
    tiny_checkpoint, expected, device_memory, host_memory
):
    with (
        fake_device(FakeLink()) as link,
        MoE(tiny_checkpoint, device_memory=device_memory, host_memory=host_memory) as moe,
    ):
        assert_same_tokens(moe, expected, rounds=2)
        assert isinstance(moe._runtime._mover, DeviceMover)
        assert link.num_copies > 0
    assert not link.locked


@pytest.mark.parametrize("host_memory", ["5%", "100%"])
def test_where_no_page_can_be_locked_copies_go_through_the_ring(
    tiny_checkpoint, expected, host_memory
):
    options = {"device_memory": "30%", "host_memory": host_memory}
    with fake_device(FakeLink(is_locking=False)) as link, MoE(tiny_checkpoint, **options) as moe:
        assert_same_tokens(moe, expected)
        assert len(link.locked) <= RING_BUFFERS


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_changes_a_token(tiny_checkpoint, expected, policy):
    budgets = {"device_memory": "25%", "host_memory": "50%"}
    with fake_device(FakeLink()), MoE(tiny_checkpoint, policy=policy, **budgets) as moe:
        assert_same_tokens(moe, expected)


@pytest.mark.parametrize(
    ("device_memory", "host_memory", "early_gate"),
    [
        ("5%", "5%", False), ("40%", "5%", False), ("40%", "40%", True), ("40%", "100%", False),
        ("70%", "30%", True), ("70%", "100%", True),
    ],
)  # fmt: skip
def test_prefetch_through_both_tiers_changes_no_token(
    tiny_checkpoint, expected, device_memory, host_memory, early_gate
):
    link = FakeLink(clock=RealClock(), bytes_per_s=1e8)
    options = {"device_memory": device_memory, "host_memory": host_memory}
    with (
        fake_device(link),
        MoE(tiny_checkpoint, prefetch=True, early_gate=early_gate, **options) as moe,
    ):
        assert_same_tokens(moe, expected, rounds=2)
        if device_memory == "40%":
            assert moe.report().prefetches.begun > 0


def test_random_budgets_policies_and_speeds_change_no_token(tiny_checkpoint, expected):
    """The seed is fixed: what it finds, it finds again."""
    chances = random.Random(0)
    for _ in range(12):
        options = {
            "device_memory": f"{chances.randint(5, 100)}%",
            "host_memory": f"{chances.randint(6, 100)}%",
            "policy": chances.choice(POLICIES),
            "num_read_threads": chances.randint(1, 4),
        }
        options["prefetch"] = options["policy"] in PREDICTING
        speed = {"bytes_per_s": 10 ** chances.uniform(5, 9), "is_locking": chances.random() < 0.7}
        with fake_device(FakeLink(**speed)), MoE(tiny_checkpoint, **options) as moe:
            assert_same_tokens(moe, expected, rounds=1)


def test_batches_sampling_and_chunks_of_a_prompt_are_as_ever(tiny_checkpoint, stock_model):
    batch = {
        "input_ids": torch.tensor([[0, 0, 0, 5, 9, 40], [7, 3, 17, 5, 9, 40]]),
        "attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]]),
    }
    kwargs = {"max_new_tokens": 12, "do_sample": False}
    with (
        fake_device(FakeLink()),
        MoE(tiny_checkpoint, device_memory="30%", host_memory="60%") as moe,
    ):
        assert torch.equal(moe.generate(**batch, **kwargs), stock_model.generate(**batch, **kwargs))
        chunked = {"prefill_chunk_size": 32}
        assert torch.equal(
            greedy(moe, LONG_PROMPT, **chunked), greedy(stock_model, LONG_PROMPT, **chunked)
        )
        assert moe.report().prefill.steps == 1 + 3


@pytest.mark.parametrize("implementation", ["grouped_mm", "auto"])
def test_packed_experts_are_copied_as_they_are_stored(tiny_checkpoint, implementation):
    """ "grouped_mm" unpacks as they compute, which is what a GPU does."""
    options = {"expert_dtype": "int8", "experts_implementation": implementation}
    with MoE(tiny_checkpoint, **options) as moe:
        tokens = greedy(moe)
    with (
        fake_device(FakeLink()) as link,
        MoE(tiny_checkpoint, device_memory="30%", host_memory="60%", **options) as moe,
    ):
        assert torch.equal(greedy(moe), tokens)
        assert link.copied_bytes < 0.7 * 3072 * link.num_copies


# Events. Each test shows that it fails when the wait it is about is removed.

TIGHT = {"device_memory": "30%", "host_memory": "10%"}


def wrong_tokens(checkpoint: Any, expected: tuple[Tensor, Tensor], link: FakeLink) -> bool:
    with fake_device(link), MoE(checkpoint, **TIGHT) as moe:
        return not torch.equal(greedy(moe), expected[0])


def test_kernels_wait_for_the_copy_of_what_they_read(tiny_checkpoint, expected, monkeypatch):
    slow = {"bytes_per_s": 1e5}
    assert not wrong_tokens(tiny_checkpoint, expected, FakeLink(**slow))
    link = FakeLink(**slow)
    monkeypatch.setattr(link, "let_kernels_wait", lambda copy: None)
    assert wrong_tokens(tiny_checkpoint, expected, link)


def test_a_read_from_disk_waits_for_the_copy_out_of_its_slot(
    tiny_checkpoint, expected, monkeypatch
):
    slow = {"bytes_per_s": 1e5}
    monkeypatch.setattr(SourceSlots, "note_copy", lambda self, slot_id, copy: None)
    # Kernels must not wait, either, for that would make the copy in time.
    with fake_device(FakeLink(**slow)) as link, MoE(tiny_checkpoint, **TIGHT) as moe:
        mover = moe._runtime._mover
        assert isinstance(mover, DeviceMover)
        assert stale_host_bytes(moe, mover, link)
    monkeypatch.undo()
    with fake_device(FakeLink(**slow)) as link, MoE(tiny_checkpoint, **TIGHT) as moe:
        mover = moe._runtime._mover
        assert isinstance(mover, DeviceMover)
        assert not stale_host_bytes(moe, mover, link)


def stale_host_bytes(moe: MoE, mover: DeviceMover, link: FakeLink) -> bool:
    """Whether an expert arrives with the bytes of another one that came through its HOST slot."""
    runtime = moe._runtime
    keys = runtime._keys[0][:4]
    slot_ids = {key: runtime.table.begin_prefetch(key) for key in keys}
    mover.load_ahead({keys[0]: slot_ids[keys[0]]})
    while runtime.tiers[-1].table.num_loading:
        mover.settle()
    for key in keys[1:]:  # two HOST slots for four experts, and no copy has been made
        mover.load_ahead({key: slot_ids[key]})
        while runtime.tiers[-1].table.num_loading:
            mover.settle()
    link.synchronize()
    found = {key: runtime.slots.tensor_of(slot_ids[key], 3072).clone() for key in keys}
    for key in keys:
        slot = bytearray(3072)
        runtime._read_expert(key, memoryview(slot))
        if not torch.equal(found[key], torch.frombuffer(slot, dtype=torch.uint8)):
            return True
    return False


class WatchedLink(FakeLink):
    """Asserts that no copy is begun into a slot whose last kernels were not marked."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0
        self.read_at: dict[int, int] = {}  # address of a DEVICE slot -> when kernels read it
        self.marked_at: dict[int, int] = {}  # id of a mark
        self.marks: list[Any] = []  # so that ids stay theirs
        self.num_checked = 0

    def mark(self) -> Any:
        mark = super().mark()
        self.marks.append(mark)
        self.marked_at[id(mark)] = self.time
        return mark

    def copy(self, source: Tensor, destination: Tensor, after: Event | None) -> Any:
        read_at = self.read_at.get(destination.data_ptr())
        if read_at is not None:
            self.num_checked += 1
            assert after is not None
            assert self.marked_at[id(after)] >= read_at
        return super().copy(source, destination, after)


def watch_kernels(monkeypatch: pytest.MonkeyPatch, link: WatchedLink) -> None:
    run = RowComputer.run

    def watched(self: RowComputer, work: Any, keys: Any, slot_ids: Any) -> None:
        run(self, work, keys, slot_ids)
        link.time += 1
        for key in keys:
            link.read_at[self._slots.address_of(slot_ids[key])] = link.time

    monkeypatch.setattr(RowComputer, "run", watched)


def test_a_slot_is_overwritten_only_after_the_kernels_that_read_it(
    tiny_checkpoint, expected, monkeypatch
):
    link = WatchedLink()
    watch_kernels(monkeypatch, link)
    with fake_device(link), MoE(tiny_checkpoint, **TIGHT) as moe:
        assert_same_tokens(moe, expected)
    assert link.num_checked > 50
    monkeypatch.setattr(DeviceSlots, "mark_read", lambda self, slot_ids: None)
    link = WatchedLink()
    watch_kernels(monkeypatch, link)
    with (
        fake_device(link),
        MoE(tiny_checkpoint, **TIGHT) as moe,
        pytest.raises(AssertionError),
    ):
        greedy(moe)


# What fails


class BrokenLink(FakeLink):
    """A link whose n-th copy from now on fails."""

    fails_in = 0

    def copy(self, source: Tensor, destination: Tensor, after: Event | None) -> Any:
        self.fails_in -= 1
        if self.fails_in == 0:
            raise RuntimeError("the link is broken")
        return super().copy(source, destination, after)


@pytest.mark.parametrize("fails_in", [1, 2, 9])
@pytest.mark.parametrize("host_memory", ["5%", "100%"])
def test_a_copy_that_fails_is_an_error_and_the_next_call_works(
    tiny_checkpoint, expected, host_memory, fails_in
):
    options = {"device_memory": "20%", "host_memory": host_memory}
    with fake_device(BrokenLink()) as link, MoE(tiny_checkpoint, **options) as moe:
        assert isinstance(link, BrokenLink)
        for _ in range(2):
            link.fails_in = fails_in
            with pytest.raises(RuntimeError, match="link is broken"):
                greedy(moe)
            assert_same_tokens(moe, expected, rounds=1)


@pytest.mark.parametrize("fails_in", [1, 3, 11])
def test_a_read_that_fails_is_an_error_and_the_next_call_works(
    tiny_checkpoint, expected, monkeypatch, fails_in
):
    with (
        fake_device(FakeLink()),
        MoE(tiny_checkpoint, device_memory="20%", host_memory="10%") as moe,
    ):
        read, calls = Reader.read, []

        def failing(self: Reader, pieces: Any) -> None:
            calls.append(pieces)
            if len(calls) == fails_in:
                raise CheckpointError("the disk is gone")
            read(self, pieces)

        monkeypatch.setattr(Reader, "read", failing)
        with pytest.raises(CheckpointError, match="disk is gone"):
            greedy(moe)
        monkeypatch.undo()
        assert_same_tokens(moe, expected, rounds=1)


@pytest.mark.parametrize("at", [1, 2, 5, 8, 13, 20, 33])
def test_an_interrupt_anywhere_leaves_nothing_behind(tiny_checkpoint, expected, monkeypatch, at):
    """Ctrl-C before or after the n-th of the mover's own steps."""
    options = {"device_memory": "40%", "host_memory": "30%"}
    with fake_device(FakeLink()), MoE(tiny_checkpoint, prefetch=True, **options) as moe:
        greedy(moe)
        calls = 0

        def interrupted(name: str) -> Any:
            method = getattr(DeviceMover, name)

            def call(self: DeviceMover, *args: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls == at:
                    if at % 2:
                        method(self, *args)
                    raise KeyboardInterrupt
                return method(self, *args)

            return call

        for name in ("_begin_copy", "_finish", "_bring"):
            monkeypatch.setattr(DeviceMover, name, interrupted(name))
        with pytest.raises(KeyboardInterrupt):
            greedy(moe, num_tokens=100)
        monkeypatch.undo()
        assert_same_tokens(moe, expected, rounds=1)


def test_a_device_without_memory_left_is_answered_with_the_numbers(
    tiny_checkpoint, expected, monkeypatch
):
    with fake_device(FakeLink()), MoE(tiny_checkpoint, device_memory="50%") as moe:
        with monkeypatch.context() as patch:

            def run(*args: Any) -> None:
                raise torch.OutOfMemoryError("tried to allocate 20 MiB")

            patch.setattr(RowComputer, "run", run)
            with pytest.raises(OutOfMemory, match=r"12 expert slots.*\n.*lower device_memory"):
                greedy(moe)
        assert_same_tokens(moe, expected, rounds=1)


def test_a_budget_that_does_not_fit_is_refused_before_weights_are_read(
    hollow_checkpoint, bytes_read_by_kernel
):
    before = bytes_read_by_kernel()
    with (
        fake_device(FakeLink(total_bytes=194 << 20)),
        pytest.raises(ConfigError, match="leaves .* for the KV cache"),
    ):
        MoE(hollow_checkpoint, device_memory="180MiB")
    assert bytes_read_by_kernel() - before < 4 << 20


def test_device_memory_without_a_device_is_refused(tiny_checkpoint):
    with pytest.raises(ConfigError, match="with device='cpu' use host_memory"):
        MoE(tiny_checkpoint, device="cpu", device_memory="1GiB")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch finds none\nhint: use host_memory"):
            MoE(tiny_checkpoint, device_memory="1GiB")


# What it reports, and prefill


def test_the_report_shows_both_tiers_and_what_came_from_disk(tiny_checkpoint):
    with (
        fake_device(FakeLink()) as link,
        MoE(tiny_checkpoint, device_memory="30%", host_memory="100%") as moe,
    ):
        greedy(moe)
        greedy(moe)
        report = moe.report()
        tiers = report.as_dict()["tiers"]
        assert list(tiers) == ["device", "host", "disk"]
        assert tiers["device"]["capacity"] == 7
        assert tiers["host"]["capacity"] == 24
        assert report.bytes_read == tiers["host"]["experts"] * 3072  # each one once
        assert report.prefill.misses + report.decode.misses == link.num_copies
        assert report.stall_s > 0
        assert "device " in str(report)


def test_a_long_prompt_streams_the_next_row_before_it_is_routed(tiny_checkpoint, monkeypatch):
    """The link is busy while a row computes: less waiting, by the modelled clock."""
    stalls = []
    for is_streaming in (True, False):
        if not is_streaming:
            monkeypatch.setattr(DeviceMover, "stream", lambda self, keys: [])
        link = FakeLink(bytes_per_s=3e8, kernel_s=3e-6)
        with (
            fake_device(link),
            MoE(tiny_checkpoint, device_memory="70%", host_memory="100%") as moe,
        ):
            for _ in range(3):
                greedy(moe, LONG_PROMPT, num_tokens=1)
            report = moe.report()
            assert (report.prefill.late_hits > 0) == is_streaming
            stalls.append(report.prefill.stall_s)
    assert stalls[0] < stalls[1]


def test_a_short_prompt_loads_only_what_it_activates(tiny_checkpoint):
    with fake_device(FakeLink()) as link, MoE(tiny_checkpoint, device_memory="100%") as moe:
        greedy(moe, PROMPT[:, :2], num_tokens=1)
        assert link.num_copies == moe.report().prefill.misses


def test_a_long_prompt_leaves_what_decoding_uses(tiny_checkpoint):
    budgets = {"device_memory": "80%", "host_memory": "100%"}
    with fake_device(FakeLink()), MoE(tiny_checkpoint, policy="lru", **budgets) as moe:
        greedy(moe, PROMPT, num_tokens=60)
        table = moe._runtime.table
        used = {key for key in table.resident_keys() if not table.is_transient(key)}
        greedy(moe, LONG_PROMPT, num_tokens=1)
        rows_ring = table.num_slots // 8
        assert len(used - set(table.resident_keys())) <= rows_ring


def test_the_deciding_thread_never_waits_for_a_copy(tiny_checkpoint, monkeypatch):
    """But where it has to know the routing, which the fake device cannot show."""
    decider, waited = threading.get_ident(), []

    class Watched(FakeLink):
        def copy(self, source: Tensor, destination: Tensor, after: Event | None) -> Any:
            copy = super().copy(source, destination, after)
            synchronize = copy.synchronize

            def noting() -> None:
                waited.append(threading.get_ident())
                synchronize()

            copy.synchronize = noting  # type: ignore[method-assign]
            return copy

        def let_kernels_wait(self, copy: Copy) -> None:
            before = len(waited)
            super().let_kernels_wait(copy)
            del waited[before:]  # kernels did

    with fake_device(Watched()), MoE(tiny_checkpoint, **TIGHT) as moe:
        greedy(moe)
    assert waited
    assert decider not in waited
