"""The command line: text on stdout, everything else on stderr, exit codes 0, 1, 2."""

from __future__ import annotations

import gc
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from moe_infinity import MoE
from moe_infinity.cli import terminal
from moe_infinity.cli.models import open_model
from tests.on_demand import ON_DEMAND_FLAGS

pytestmark = [pytest.mark.timeout(30), pytest.mark.arithmetic]
NUM_MOE_LAYERS = 3
NUM_EXPERTS = 8
TOP_K = 2
BYTES_PER_EXPERT = 3 * 32 * 16 * 2
PROMPT = "w5 w6 w9 w100 w31"
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}w77"


@pytest.fixture
def expected(resident_model) -> list[int]:
    """What a model with all experts in memory continues PROMPT with."""
    return continued(resident_model)


def continued(model: Any, **options: Any) -> list[int]:
    ids = torch.tensor([[5, 6, 9, 100, 31]])
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 16}
    tokens: list[int] = model.generate(input_ids=ids, **arguments, **options)[0, 5:].tolist()
    return tokens


def words(token_ids: list[int]) -> str:
    return " ".join(f"w{token_id}" for token_id in token_ids)


def run_args(folder: Path, *more: object) -> list[object]:
    return ["run", folder, "-p", PROMPT, "--max-new-tokens", 16, "--host-memory", "25%", *more]


def test_no_collection_looks_through_what_was_loaded_while_a_command_runs(tiny_checkpoint):
    with open_model(str(tiny_checkpoint), yes=False, host_memory="25%"):
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


# run


def test_run_writes_the_text_and_nothing_else_to_stdout(command, tiny_checkpoint, expected):
    outcome = command(*run_args(tiny_checkpoint))
    assert (outcome.code, outcome.out) == (0, words(expected) + "\n")


def test_run_json_is_one_object_with_the_promised_keys(command, tiny_checkpoint, expected):
    outcome = command(*run_args(tiny_checkpoint, "--json"))
    result = json.loads(outcome.out)
    assert outcome.code == 0
    assert len(outcome.out.splitlines()) == 1
    assert set(result) >= {"text", "token_ids", "ttft_s", "tpot_s", "report"}
    assert (result["text"], result["token_ids"]) == (words(expected), expected)
    assert result["ttft_s"] > 0 < result["tpot_s"]


def test_run_exact_gives_the_tokens_of_stock(command, tiny_checkpoint, stock_model):
    outcome = command(*run_args(tiny_checkpoint, "--exact", "--json"))
    assert json.loads(outcome.out)["token_ids"] == continued(stock_model)


def test_run_json_reports_what_the_cache_did(command, tiny_checkpoint):
    report = json.loads(command(*run_args(tiny_checkpoint, "--json", *ON_DEMAND_FLAGS)).out)[
        "report"
    ]
    assert 0 <= report["prefill"]["hit_rate"] <= 1
    assert 0 < report["decode"]["hit_rate"] < 1
    misses = report["prefill"]["misses"] + report["decode"]["misses"]
    assert report["bytes_read"] == misses * BYTES_PER_EXPERT
    assert report["stall_s"] > 0


@pytest.mark.grid
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("host_memory", ["5%", "25%", "100%"])
def test_run_gives_the_same_tokens_for_every_budget_and_policy(
    command, tiny_checkpoint, expected, host_memory, policy
):
    args = ["--max-new-tokens", 16, "--host-memory", host_memory, "--policy", policy, "--json"]
    outcome = command("run", tiny_checkpoint, "--prompt", PROMPT, *args)
    assert json.loads(outcome.out)["token_ids"] == expected


def test_run_json_of_one_token_is_valid_json_without_a_time_per_token(command, tiny_checkpoint):
    args = ["-p", "w5", "--max-new-tokens", 1, "--host-memory", "25%", "--json"]
    result = json.loads(command("run", tiny_checkpoint, *args).out)
    assert len(result["token_ids"]) == 1
    assert result["tpot_s"] is None
    assert result["report"]["decode"]["hit_rate"] is None


def test_run_reads_the_prompt_from_stdin(command, tiny_checkpoint, expected):
    args = ["-p", "-", "--max-new-tokens", 16, "--host-memory", "25%"]
    assert command("run", tiny_checkpoint, *args, stdin=PROMPT).out == words(expected) + "\n"


def test_run_samples_the_same_text_for_the_same_seed(command, tiny_checkpoint):
    args = run_args(tiny_checkpoint, "--temperature", 2.0, "--seed")
    texts = [command(*args, seed).out for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_run_prints_its_report_to_stderr(command, tiny_checkpoint, expected):
    outcome = command(*run_args(tiny_checkpoint, "--report"))
    assert outcome.out == words(expected) + "\n"
    assert "hit rate" in outcome.err
    assert "decode" in outcome.err


def test_an_empty_prompt_is_answered_by_a_message(command, tiny_checkpoint):
    """The tokenizer adds nothing to it: there is no token to continue."""
    outcome = command("run", tiny_checkpoint, "-p", "", "--host-memory", "25%")
    assert outcome.code in (1, 2)
    assert outcome.out == ""
    assert "prompt" in outcome.err


# inspect


def test_inspect_json_tells_layers_experts_and_bytes(command, tiny_checkpoint):
    outcome = command("inspect", tiny_checkpoint, "--json")
    summary = json.loads(outcome.out)
    assert outcome.code == 0
    assert (summary["moe_layers"], summary["experts_per_layer"]) == (NUM_MOE_LAYERS, NUM_EXPERTS)
    assert summary["top_k"] == TOP_K
    assert summary["bytes_per_expert"] == BYTES_PER_EXPERT
    assert summary["expert_bytes"] == NUM_MOE_LAYERS * NUM_EXPERTS * BYTES_PER_EXPERT
    file_bytes = (tiny_checkpoint / "model.safetensors").stat().st_size
    parts = ("expert_bytes", "dense_bytes", "header_bytes")
    assert sum(summary[part] for part in parts) == file_bytes


def test_inspect_tells_what_budgets_hold_and_run_then_has_as_many_slots(command, tiny_checkpoint):
    budgets = json.loads(command("inspect", tiny_checkpoint, "--json").out)["budgets"]
    assert [budget["host_memory"] for budget in budgets][-1] == "100%"
    for budget in budgets:
        with MoE(tiny_checkpoint, host_memory=budget["host_memory"]) as moe:
            host = moe.report().as_dict()["tiers"]["host"]
        assert (host["capacity"], host["capacity_bytes"]) == (
            budget["experts"],
            budget["num_bytes"],
        )


def test_inspect_prints_a_table_for_people(command, tiny_checkpoint):
    outcome = command("inspect", tiny_checkpoint)
    assert outcome.code == 0
    for text in ("Qwen3Moe", "3.0 KiB", "72.0 KiB", "host_memory", "25%", "100%"):
        assert text in outcome.out


def test_inspect_gives_the_same_for_shards_and_one_file(
    command, tiny_checkpoint, sharded_checkpoint
):
    found = []
    for folder in (tiny_checkpoint, sharded_checkpoint):
        summary = json.loads(command("inspect", folder, "--json").out)
        found.append({k: v for k, v in summary.items() if k not in ("model", "header_bytes")})
    assert found[0] == found[1]


# trace


@pytest.fixture
def prompts(tmp_path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": PROMPT, "id": 1}, {"prompt": "w7 w8"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "\n")
    return file


def trace_args(folder: Path, prompts: Path, out: Path, *more: object) -> list[object]:
    args = ["--max-new-tokens", 16, "--host-memory", "25%"]
    return ["trace", folder, "--prompts", prompts, "-o", out, *args, *more]


def test_trace_writes_routing_in_the_shared_format(command, tiny_checkpoint, prompts, tmp_path):
    out = tmp_path / "out.npz"
    outcome = command(*trace_args(tiny_checkpoint, prompts, out))
    assert (outcome.code, outcome.out) == (0, "")
    with np.load(out) as trace:
        experts = trace["experts"]
        offsets = trace["offsets"]
    lengths = [5 + 15, 2 + 15]  # the last token written is never routed
    assert (experts.dtype, experts.shape) == (np.uint8, (sum(lengths), NUM_MOE_LAYERS, TOP_K))
    assert (offsets.dtype, offsets.tolist()) == (np.int64, [0, lengths[0], sum(lengths)])
    assert experts.max() < NUM_EXPERTS
    assert outcome.said("2 sequences")


def test_a_trace_is_the_routing_of_stock_transformers(
    command, tiny_checkpoint, prompts, tmp_path, stock_routing, stock_model
):
    command(*trace_args(tiny_checkpoint, prompts, tmp_path / "out.npz", "--limit", 1, "--exact"))
    stock_routing.clear()
    written = continued(stock_model)
    steps = [np.stack(step, axis=1) for step in stock_routing]
    with np.load(tmp_path / "out.npz") as trace:
        assert np.array_equal(trace["experts"], np.concatenate(steps))
        assert trace["token_ids"].tolist() == [5, 6, 9, 100, 31, *written[:-1]]
        assert trace["is_prefill"].tolist() == [True] * 5 + [False] * 15


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (b"not json\n", "line 1"),
        (b'{"prompt": "w5"}\n{"text": "w6"}\n', "line 2"),
        (b'{"prompt": "w5"}\n[1]\n', "line 2"),
        (b"3\n", "line 1"),
        (b"", "no prompts"),
        (b'{"prompt": "w5"}\n\xff\xfe\n', "prompts.jsonl"),
    ],
)
def test_a_bad_prompt_file_is_named_and_no_trace_is_written(
    command, tiny_checkpoint, tmp_path, lines, said
):
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "out.npz"
    prompts.write_bytes(lines)
    outcome = command(*trace_args(tiny_checkpoint, prompts, out))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.said(said)
    assert not out.exists()


def test_a_trace_into_a_folder_that_does_not_exist_is_code_1(
    command, tiny_checkpoint, prompts, tmp_path
):
    outcome = command(*trace_args(tiny_checkpoint, prompts, tmp_path / "nowhere" / "out.npz"))
    assert outcome.code == 1
    assert outcome.said("nowhere")


# chat


@pytest.fixture
def chatty(copy_of, tiny_checkpoint) -> Path:
    """The tiny checkpoint with a chat template."""
    folder: Path = copy_of(tiny_checkpoint)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_chat_without_a_chat_template_is_code_1_and_says_what_to_use(command, tiny_checkpoint):
    outcome = command("chat", tiny_checkpoint, "--host-memory", "25%", stdin="w5\n")
    assert (outcome.code, outcome.out) == (1, "")
    assert "chat template" in outcome.err
    assert "run" in outcome.err


def test_chat_answers_every_line_with_the_conversation_so_far(command, chatty, resident_model):
    args = ["--host-memory", "25%", "--max-new-tokens", 6]
    outcome = command("chat", chatty, *args, stdin="w5 w6\nw9\n")
    answers = outcome.out.splitlines()
    assert (outcome.code, len(answers)) == (0, 2)
    told = [5, 6, 77]
    for number, answer in enumerate(answers):
        ids = torch.tensor([told])
        reply = resident_model.generate(
            input_ids=ids, attention_mask=ids > 0, do_sample=False, max_new_tokens=6
        )[0, len(told) :].tolist()
        assert answer == words(reply), number
        told = [*told[:-1], *reply, 9, 77]


def test_on_a_terminal_chat_says_how_it_ends(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(terminal, "stderr", Console(file=shown, force_terminal=True))
    monkeypatch.setattr(terminal, "user_lines", lambda: iter(()))
    terminal.talk(lambda messages: iter(()))
    assert "Ctrl-D ends the chat" in shown.getvalue()


@pytest.mark.parametrize("stdin", ["", "\n", "   \nw5\n"])
def test_chat_ends_at_an_empty_line_or_the_end_of_input(command, chatty, stdin):
    outcome = command("chat", chatty, "--host-memory", "25%", stdin=stdin)
    assert (outcome.code, outcome.out) == (0, "")
