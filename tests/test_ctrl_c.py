"""Ctrl-C in the middle of a token: a library's caller gets KeyboardInterrupt and the model gives
right tokens afterwards; a command ends soon, with code 130 and not a word."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_infinity import MoE
from moe_infinity.engine import layer
from tests.disk import Disk, Read

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.sample(3),
    # Ctrl-C may fall between psutil's open() and what closes the file.
    pytest.mark.filterwarnings("ignore:unclosed file .*/proc/:ResourceWarning"),
]
DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
INPUTS = {"input_ids": torch.tensor([[5, 6, 9]]), "attention_mask": torch.ones(1, 3).long()}
FOR_LONG = {"do_sample": False, "max_new_tokens": 480}  # a second or more: no test waits for it


def tokens_of(moe: MoE) -> list[int]:
    ids: list[int] = moe.generate(**INPUTS, do_sample=False, max_new_tokens=12)[0].tolist()
    return ids


def press_ctrl_c() -> None:
    """As a terminal does it."""
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def expected(tiny_checkpoint) -> list[int]:
    with MoE(tiny_checkpoint, host_memory="100%") as moe:
        return tokens_of(moe)


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


OPTIONS: dict[str, dict[str, Any]] = {
    "demand loads": {},
    "prefetch": {"prefetch": True},
    "early router": {"prefetch": True, "early_router": True},
}


@pytest.fixture(params=list(OPTIONS.values()), ids=list(OPTIONS))
def moe(request, tiny_checkpoint) -> Iterator[MoE]:
    """Whatever happened to it must have left it in order, and closing it leaves no thread."""
    threads = set(threading.enumerate())
    with MoE(tiny_checkpoint, host_memory="25%", **request.param) as moe:
        yield moe
        moe.check_invariants()
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)
        assert not thread.is_alive(), thread


@contextmanager
def ctrl_c_after(seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, press_ctrl_c)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@pytest.mark.sample(3)
@pytest.mark.parametrize("times", [4, pytest.param(10, marks=pytest.mark.slow)])
def test_at_any_moment_it_surfaces_and_the_next_tokens_are_right(moe, expected, times):
    moments = random.Random(0)
    for _ in range(times):
        with pytest.raises(KeyboardInterrupt), ctrl_c_after(moments.uniform(0.01, 0.1)):
            moe.generate(**INPUTS, **FOR_LONG)
        assert tokens_of(moe) == expected
        moe.check_invariants()


@pytest.mark.grid
@pytest.mark.parametrize("number", [0, 1, 20, 50])
def test_while_an_expert_is_read_it_surfaces_at_once(moe, disk, expected, number):
    """The read is waited for only when its slot is needed again."""
    go_on = threading.Event()
    pressed_at: list[float] = []

    def act(read: Read) -> None:
        if read.kind == "demand" and read.number == number:
            pressed_at.append(time.monotonic())
            press_ctrl_c()
        if pressed_at:
            assert go_on.wait(20)

    disk.act = act
    with pytest.raises(KeyboardInterrupt):
        moe.generate(**INPUTS, **FOR_LONG)
    assert time.monotonic() - pressed_at[0] < 5
    go_on.set()
    assert tokens_of(moe) == expected


def test_a_stream_ends_with_it_and_leaves_no_thread_that_generates(moe, disk, expected):
    def act(read: Read) -> None:
        if read.kind == "demand" and read.number == 40:
            press_ctrl_c()

    disk.act = act
    with pytest.raises(KeyboardInterrupt):
        list(moe.stream(INPUTS, **FOR_LONG))
    assert "moe-infinity-generate" not in [thread.name for thread in threading.enumerate()]
    assert tokens_of(moe) == expected


def test_a_stream_ends_in_the_middle_of_its_prompt(moe, disk, expected):
    """Whose pass may take minutes."""
    stream = moe.stream(INPUTS, **FOR_LONG)

    def act(read: Read) -> None:
        if read.kind == "demand" and read.number == 1:
            press_ctrl_c()
            assert stream._cancelled.wait(20)

    disk.act = act
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert stream.token_ids == []
    assert "moe-infinity-generate" not in [thread.name for thread in threading.enumerate()]
    disk.act = lambda read: None
    assert tokens_of(moe) == expected


def test_a_stream_ends_between_two_experts_of_its_prompt(moe, monkeypatch, expected):
    """A layer of a long prompt may take seconds."""
    monkeypatch.setattr(layer, "STOPPABLE_ROWS", 1)
    stream = moe.stream({"input_ids": torch.arange(3, 99)[None]}, **FOR_LONG)
    computers = {id(computer): computer for computer in moe.engine.path.computers}.values()
    computed: list[int] = []
    for computer in computers:
        compute = computer.compute

        def running(work: Any, keys: Any, slot_ids: Any, compute: Any = compute) -> None:
            computed.append(len(keys))
            stream._cancelled.set()
            compute(work, keys, slot_ids)

        monkeypatch.setattr(computer, "compute", running)
    assert list(stream) == []
    assert computed == [1]
    monkeypatch.undo()
    assert tokens_of(moe) == expected


def test_a_stream_ends_while_it_waits_for_an_expert_of_its_prompt(moe, disk, expected):
    """Without waiting for the disk."""
    stream = moe.stream(INPUTS, **FOR_LONG)
    go_on = threading.Event()

    def act(read: Read) -> None:
        if read.kind == "demand":
            stream._cancelled.set()
            assert go_on.wait(20)

    disk.act = act
    began = time.monotonic()
    assert list(stream) == []
    assert time.monotonic() - began < 5
    go_on.set()
    disk.act = lambda read: None
    assert tokens_of(moe) == expected


def leave(moe: MoE, monkeypatch: pytest.MonkeyPatch, at_row: int) -> None:
    """A stream, in the middle of its prompt."""
    stream = moe.stream(INPUTS, **FOR_LONG)
    layer = moe.engine.layer

    def cancelling(moe_layer_idx: int, *args: Any) -> Any:
        if moe_layer_idx == at_row:
            stream._cancelled.set()
        return layer(moe_layer_idx, *args)

    with monkeypatch.context() as patched:
        patched.setattr(moe.engine, "layer", cancelling)
        assert list(stream) == []
    assert stream.token_ids == []


@pytest.mark.grid
@pytest.mark.parametrize("at_row", [0, 1])
def test_of_a_prompt_that_was_left_nothing_is_recorded(moe, monkeypatch, expected, at_row):
    with moe.recording() as finish:
        tokens_of(moe)
        leave(moe, monkeypatch, at_row)
        assert moe.request_eams() == []
        tokens_of(moe)
        traces = finish()
    assert [trace.token_ids_T.tolist() for trace in traces] == [expected[:-1]] * 2


def test_a_stream_that_could_not_begin_cancels_nothing_else(moe, expected):
    with pytest.raises(AttributeError):
        list(moe.stream(INPUTS, generation_config={"max_new_tokens": 3}))
    moe.model(**INPUTS)
    assert tokens_of(moe) == expected


@pytest.mark.grid
@pytest.mark.parametrize("has_started", [False, True])
def test_a_stream_ends_while_its_thread_starts(moe, expected, monkeypatch, has_started):
    stream = moe.stream(INPUTS, **FOR_LONG)
    start = stream._thread.start

    def interrupted() -> None:
        if has_started:
            start()
        raise KeyboardInterrupt

    monkeypatch.setattr(stream._thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert not stream._thread.is_alive()
    assert tokens_of(moe) == expected


def test_a_stream_that_was_left_stops_no_other(moe, expected):
    left = moe.stream(INPUTS, **FOR_LONG)
    next(iter(left))
    left._cancelled.set()
    other = moe.stream(INPUTS, do_sample=False, max_new_tokens=12)
    list(other)
    assert other.token_ids == expected[3:]


# Runs the command line in forks, as its imports take seconds, and interrupts each of them so many
# seconds after what was waited for: its start, or its first text. Impatient ones press again soon.
# How it ended goes to stdout.
INTERRUPTER = """
import json, os, signal, sys, tempfile, time
from moe_infinity import model
from moe_infinity import __main__ as cli
from transformers.models.qwen3_moe import modeling_qwen3_moe

job = json.loads(sys.argv[1])
for waits_for_text, seconds, again_s in job["moments"]:
    output, into = os.pipe()
    errors = tempfile.TemporaryFile()
    child = os.fork()
    if not child:
        os.dup2(into, 1)
        os.dup2(errors.fileno(), 2)
        os.close(into)
        sys.argv = ["moe-infinity", *job["command"]]
        os.write(1, b"!")
        cli.main()
    os.close(into)
    assert os.read(output, 1) == b"!"
    if waits_for_text:
        os.read(output, 1)
    time.sleep(seconds)
    os.kill(child, signal.SIGINT)
    pressed_at = time.monotonic()
    if again_s:
        time.sleep(again_s)
        os.kill(child, signal.SIGINT)
    status = os.waitpid(child, 0)[1]
    errors.seek(0)
    print(json.dumps({
        "code": os.waitstatus_to_exitcode(status),
        "took_s": time.monotonic() - pressed_at,
        "err": errors.read().decode(),
    }))
"""


Moment = tuple[bool, float, float]


def interrupted(*command: object, moments: list[Moment]) -> list[dict[str, Any]]:
    job = {"command": [*map(str, command)], "moments": moments}
    args = [sys.executable, "-c", INTERRUPTER, json.dumps(job)]
    done = subprocess.run(args, stdout=subprocess.PIPE, text=True, check=True)
    outcomes = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(outcomes) == len(moments)
    return outcomes


def end_well(outcomes: list[dict[str, Any]]) -> None:
    for outcome in outcomes:
        assert (outcome["code"], outcome["err"].strip()) == (130, "")
        assert outcome["took_s"] < 30  # on a busy machine; a second as a rule


@pytest.mark.timeout(300)
@pytest.mark.parametrize("times", [0, pytest.param(6, marks=pytest.mark.slow)])
def test_a_command_ends_soon_with_code_130_and_not_a_word(tmp_path, times):
    history = tmp_path / "history.npz"
    rng = random.Random(1)
    outcomes = interrupted(
        "run", DEMO, "-p", "Once upon a time", "--max-new-tokens", 900,
        "--host-memory", "25%", "--prefetch", "--history", history,
        moments=[(True, 0.1, 0)]
        + [(True, rng.uniform(0, 0.2), 0) for _ in range(times)]
        + [(False, rng.uniform(0.01, 1), 0) for _ in range(times)]
        + [(True, rng.uniform(0, 0.2), rng.uniform(0.005, 0.2)) for _ in range(times)],
    )  # fmt: skip
    end_well(outcomes)
    assert [file.name for file in tmp_path.iterdir()] == ["history.npz"]
    with MoE(DEMO, host_memory="25%", history=history) as moe:  # is whole
        assert moe.engine.predictor is not None
        assert moe.engine.predictor.num_tokens > 0


IN_A_FINALIZER = """
import os, signal, time
from moe_infinity import __main__ as cli

class Held:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)

def app():
    Held()
    time.sleep(50)

cli.app = app
cli.main()
"""


def test_ctrl_c_is_not_lost_where_python_drops_exceptions():
    done = subprocess.run([sys.executable, "-c", IN_A_FINALIZER], capture_output=True, timeout=40)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trace_that_is_interrupted_is_not_written(tmp_path):
    """It generates in the main thread."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Once upon a time"}))
    outcomes = interrupted(
        "trace", DEMO, "--prompts", prompts, "-o", tmp_path / "trace.npz",
        "--max-new-tokens", 900, "--host-memory", "25%",
        moments=[(False, seconds, 0) for seconds in (0.1, 1.5, 2, 3)],
    )  # fmt: skip
    end_well(outcomes)
    assert list(tmp_path.iterdir()) == [prompts]


def test_in_a_chat_it_ends_the_answer_and_the_next_question_is_answered(command, disk):
    def act(read: Read) -> None:
        if read.kind == "demand" and read.number == 1100:  # in the middle of the first answer
            press_ctrl_c()

    disk.act = act
    questions = ["What is a fever?", "Tell me about the sea."]
    options = ["--max-new-tokens", 24, "--host-memory", "25%"]
    outcome = command("chat", DEMO, *options, stdin="\n".join(questions))
    assert (outcome.code, outcome.err.count("(stopped)")) == (0, 1)
    stopped, answer = outcome.out.splitlines()
    messages = [
        {"role": "user", "content": questions[0]},
        {"role": "assistant", "content": stopped.strip()},
        {"role": "user", "content": questions[1]},
    ]
    with MoE(DEMO, host_memory="100%") as moe:
        inputs = moe.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        stream = moe.stream(inputs, max_new_tokens=24, do_sample=False)
        assert answer == "".join(stream)
    assert 0 < len(stopped) < len(answer)
