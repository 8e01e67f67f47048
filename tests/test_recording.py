"""What is kept of requests while they run, asked for in every way that is natural: `recording()`
and the EAMs of `generate()`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from moe_infinity import ConfigError, MoE, TraceError
from moe_infinity.predict import recorder
from moe_infinity.tools.tracing import read_prompts, record_trace

pytestmark = [pytest.mark.timeout(60), pytest.mark.arithmetic]
PROMPT = torch.tensor([[5, 6, 9], [7, 8, 9]])
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture
def moe(tiny_checkpoint):
    with MoE(tiny_checkpoint, host_memory="50%") as moe:
        yield moe


def generate(moe: MoE, *args: Any, **kwargs: Any) -> Any:
    return moe.generate(*args, attention_mask=torch.ones_like(PROMPT), **kwargs)


def test_traces_are_given_inside_and_after_as_often_as_they_are_asked_for(moe):
    with moe.recording() as finish:
        generate(moe, PROMPT, **GREEDY)
        traces = finish()
        generate(moe, PROMPT, **GREEDY)
        assert finish() is traces
    assert finish() is traces
    assert len(traces) == 2
    with moe.recording() as of_second:
        generate(moe, PROMPT, **GREEDY)
    for found, expected in zip(of_second(), traces, strict=True):
        assert (found.experts_TLK == expected.experts_TLK).all()


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_call_of_the_model_itself_that_fails_is_no_part_of_a_recording(moe, goes_on):
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with moe.recording() as finish:
        generate(moe, PROMPT, **GREEDY)
        hook = moe.model.model.layers[1].self_attn.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            moe.model(PROMPT)
        hook.remove()
        if goes_on:
            moe.model(PROMPT)
        lengths = [len(trace.token_ids_T) for trace in finish()]
    assert lengths == [14, 14] + [3, 3] * goes_on


def test_a_recording_inside_another_is_refused_and_harms_nothing(moe):
    with moe.recording() as finish:
        with pytest.raises(ConfigError, match="already"), moe.recording():
            pass
        generate(moe, PROMPT, **GREEDY)
    assert len(finish()) == 2


def test_a_configuration_in_second_place_counts_as_one_by_name(moe):
    """A sequence that has ended is filled up with padding, which nobody learns from."""
    ids = generate(moe, PROMPT, **GREEDY)
    end = next(t for t in ids[0, 3:].tolist() if t not in ids[1, 3:])  # of the first alone
    config = GenerationConfig(**GREEDY, eos_token_id=int(end), pad_token_id=0)
    found = []
    for given in ({"inputs": PROMPT, "generation_config": config}, (PROMPT, config)):
        if isinstance(given, dict):
            generate(moe, **given)
        else:
            generate(moe, *given)
        found.append([int(eam.decode.sum()) for eam in moe.request_eams()])
    assert found[0] == found[1]
    assert found[0][0] < found[0][1]


# moe-infinity trace


@pytest.mark.parametrize("line", ['{"prompt": ""}', '{"prompt": null}', '{"prompt": 7}', "[]", "7"])
def test_what_is_no_prompt_is_said_with_its_line(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "w5"}\n\n' + line + "\n")
    with pytest.raises(TraceError, match="line 3"):
        read_prompts(file)


def test_a_trace_that_could_not_be_written_is_refused_before_generating(moe, tmp_path, monkeypatch):
    def refused(output: Path) -> None:
        with pytest.raises(TraceError, match="no file can be written"):
            record_trace(moe, ["w5"], output, max_new_tokens=4)

    refused(tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    refused(tmp_path / "trace.npz")
    assert moe.report().prefill.steps == 0


def test_ctrl_c_while_a_step_is_handed_over_neither_loses_nor_repeats_it(moe):
    """At every line of it, in turn."""
    left = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != recorder.__file__:
            return None
        left -= event == "line"
        if left == 0:
            raise KeyboardInterrupt
        return trace

    for num_lines in range(1, 1000):
        with moe.recording() as finish:
            generate(moe, PROMPT, do_sample=False, max_new_tokens=2)
            others = replace(moe.engine.recorder.step, begins_B=np.ones(2, dtype=bool))
            left, before = num_lines, sys.gettrace()
            sys.settrace(trace)
            try:
                moe.engine.bookkeeping.note_begin(others)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            assert [len(trace.token_ids_T) for trace in finish()] == [4, 4], num_lines
        if left > 0:
            break
    assert 20 < num_lines < 999
