"""Thoughts end where their budget does, as all APIs say it, and the answer goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from moe_infinity import MoE
from moe_infinity.server.efforts import ReasoningFields
from moe_infinity.server.grammars import GrammarCompiler, Structure, message_in, part_of
from moe_infinity.server.sampling import Constraint, Sampler
from moe_infinity.server.thoughts import ThoughtBudget, ThoughtForm
from tests.server.conftest import DEMO
from tests.server.serving import Serving, serving

QWEN = ThoughtForm("<think>", "</think>", "\n</think>")
HARMONY = ThoughtForm(
    "<|channel|>analysis<|message|>", "<|end|>", "<|end|><|start|>assistant"
)  # fmt: skip

MARKS = ["<|channel|>", "<|message|>", "<|start|>", "<|end|>"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The demo model's, with the marks of two kinds of models as tokens."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.add_tokens(MARKS, special_tokens=True)
    return tokenizer


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def written(tokenizer: Any, form: ThoughtForm, budget: int, prompt: str, wish: str) -> str:
    """What a model writes that wants to write `wish`, as often as it can."""
    prompt_ids = ids_of(tokenizer, prompt)
    has_begun = prompt.rstrip().endswith(form.begin)
    limit = ThoughtBudget(tokenizer, form, budget, prompt_ids, has_begun=has_begun)
    sampler = Sampler([limit], prompt_ids, takes_likeliest=True)
    wanted = ids_of(tokenizer, wish)
    ids: list[int] = []
    at = 0
    while at < len(wanted):
        logits_V = torch.zeros(len(tokenizer))
        logits_V[wanted[at]] = 9.0
        ids.append(sampler.choose(logits_V).token_id)
        at += ids[-1] == wanted[at]
        assert len(ids) < 200
    text: str = tokenizer.decode(ids)
    return text


@pytest.mark.parametrize("budget", [0, 1, 2, 5, 9])
def test_a_thought_is_closed_after_so_many_tokens(tokenizer, budget):
    wish = "z" * 12  # a token each
    text = written(tokenizer, QWEN, budget, "hi<think>", wish)
    assert text == "z" * budget + "\n</think>" + "z" * (12 - budget)


def test_a_newline_before_the_end_is_not_repeated(tokenizer):
    assert written(tokenizer, QWEN, 0, "<think>\n", "zz") == "</think>zz"
    num = len(ids_of(tokenizer, "zz\n"))
    assert written(tokenizer, QWEN, num, "<think>\n", "zz\nz") == "zz\n</think>z"


def test_a_thought_that_the_model_ends_is_as_it_is(tokenizer):
    wish = "zzz</think>" + "z" * 40
    assert written(tokenizer, QWEN, 20, "<think>", wish) == wish


def test_what_is_no_thought_does_not_count(tokenizer):
    wish = "z" * 40
    assert written(tokenizer, QWEN, 3, "hi", wish) == wish


def test_thoughts_that_the_model_begins_share_the_budget(tokenizer):
    wish = "a<think>zzz</think>b<think>zzzz"
    text = written(tokenizer, QWEN, 5, "hi", wish)
    assert text == "a<think>zzz</think>b<think>zz\n</think>zz"


def forbidden(tokenizer: Any, form: ThoughtForm, behind: str) -> list[str]:
    """What may not follow, where there is no budget."""
    ids = ids_of(tokenizer, behind)
    limit = ThoughtBudget(tokenizer, form, 0, ids[:1], has_begun=False)
    scores_1V = limit(torch.tensor([ids]), torch.zeros(1, len(tokenizer)))
    return [tokenizer.decode([at]) for at in scores_1V[0].isinf().nonzero()[:, 0].tolist()]


def test_without_a_budget_no_thought_begins(tokenizer):
    assert forbidden(tokenizer, QWEN, "hi") == ["<think>"]
    # Another channel may begin.
    assert forbidden(tokenizer, HARMONY, "<|start|>") == []
    (analysis,) = forbidden(tokenizer, HARMONY, "<|start|><|channel|>")
    assert "analysis".startswith(analysis)


def test_the_analysis_of_gpt_oss_ends_as_a_message_of_its_own(tokenizer):
    wish = "<|channel|>analysis<|message|>zzzzzz<|channel|>final<|message|>z"
    text = written(tokenizer, HARMONY, 4, "<|start|>assistant", wish)
    assert text == (
        "<|channel|>analysis<|message|>zzzz<|end|><|start|>assistantzz<|channel|>final<|message|>z"
    )


def test_a_character_is_not_cut(tokenizer):
    wish = "é漢😀" * 3
    for budget in range(12):
        assert "�" not in written(tokenizer, QWEN, budget, "<think>", wish)


def test_what_is_forbidden_otherwise_is_not_enforced(tokenizer):
    limit = ThoughtBudget(tokenizer, QWEN, 0, [5], has_begun=True)
    (forced, *_) = ids_of(tokenizer, QWEN.closing)
    scores_1V = torch.zeros(1, len(tokenizer))
    scores_1V[0, forced] = -torch.inf
    assert limit(torch.tensor([[5]]), scores_1V).isinf().sum() == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"reasoning_budget_tokens": 7}, 7),
        ({"thinking_budget_tokens": 7}, 7),
        ({"thinking_token_budget": 7}, 7),
        ({"thinking_budget": 7}, 7),
        ({"reasoning_budget": 7}, 7),
        ({"reasoning_budget": -1}, None),
        ({"reasoning": {"max_tokens": 7}}, 7),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}, "thinking_budget": 9}, 7),
        ({"thinking": {"type": "disabled", "budget_tokens": 7}}, 0),
        ({"thinking": {"budget_tokens": 7}}, 7),
        ({"thinking": True}, None),
        ({"thinking": False}, 0),
        ({"chat_template_kwargs": {"thinking_budget": 7}}, 7),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 0),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}, None),
        ({"reasoning_effort": "none", "thinking_budget": 7}, 0),
        ({"enable_thinking": False}, 0),
        ({"reasoning_effort": "high"}, None),
    ],
    ids=str,
)
def test_a_budget_has_many_names(fields, expected):
    assert ReasoningFields.model_validate(fields).thought_budget == expected


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_grammar_takes_the_end_that_is_written_for_the_model(budget, is_special):
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=is_special)
    compiler = GrammarCompiler(tokenizer, len(tokenizer), [0])
    lark = compiler.lark("x")
    choice = lark.add(part_of(Structure("choice", ["yes", "no"], "x"), "x"))
    start = message_in(lark, None, [choice], is_thinking=True)
    constraint = Constraint(compiler.compiled(lark, start, "x"))
    prompt_ids = ids_of(tokenizer, "hi<think>")
    limit = ThoughtBudget(tokenizer, QWEN, budget, prompt_ids, has_begun=True)
    sampler = Sampler([constraint, limit], prompt_ids, seed=1, constraint=constraint)
    ids: list[int] = []
    while not constraint.is_complete and ids[-1:] != [0]:
        logits_V = torch.zeros(len(tokenizer))
        logits_V[ids_of(tokenizer, "z")] = 20.0 if len(ids) < budget else 0.0
        ids.append(sampler.choose(logits_V).token_id)
    thought, answer = tokenizer.decode(ids).replace("<|endoftext|>", "").split("</think>")
    assert thought == "z" * budget + "\n"
    assert answer in ("yes", "no")


# through the server

THINKS = (
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}<|im_start|>assistant\n"
    "<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
)
ASKED: list[Any] = [{"role": "user", "content": "What is a fever?"}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "wait", "parameters": {"type": "object", "additionalProperties": False}},
}


@pytest.fixture(scope="module")
def server(demo: MoE) -> Iterator[Serving]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo.tokenizer, "chat_template", THINKS)
        with serving(demo, max_batch=4, served_name="demo") as server:
            yield server


def ask(server: Serving, path: str = "chat/completions", **fields: Any) -> Any:
    body = {"messages": ASKED, "max_tokens": 60, "temperature": 0} | fields
    if path == "responses":
        body = {"input": "What is a fever?", "max_output_tokens": 60, "temperature": 0} | fields
    answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_budget_tokens": 12},
        {"thinking": {"type": "enabled", "budget_tokens": 12}},
        {"chat_template_kwargs": {"thinking_budget": 12}},
    ],
    ids=str,
)
def test_the_answer_goes_on_behind_a_thought(server, tokenizer, fields):
    answer = ask(server, **fields, n=2)
    for choice in answer["choices"]:
        thought = choice["message"]["reasoning_content"]
        assert len(ids_of(tokenizer, thought.rstrip("\n"))) in (11, 12)
        assert choice["message"]["content"].strip()
    details = answer["usage"]["completion_tokens_details"]
    assert 24 <= details["reasoning_tokens"] <= 28  # with the newline that the end begins with


def test_without_a_budget_the_thought_takes_all_tokens(server):
    free = ask(server)
    assert not free["choices"][0]["message"]["content"]
    counts = free["usage"]
    num_reasoning = counts["completion_tokens_details"]["reasoning_tokens"]
    assert num_reasoning == counts["completion_tokens"] - 1 > 12  # without the end token


def test_a_stream_has_the_thought_and_then_the_answer(server):
    whole = ask(server, thinking_budget=12)
    body = {"messages": ASKED, "max_tokens": 60, "temperature": 0, "thinking_budget": 12}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as got:
        lines = [line[6:] for line in got.iter_lines() if line.startswith("data: {")]
    *chunks, last = map(json.loads, lines)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    kinds = [next(iter(each)) for each in deltas[1:] if each]
    assert kinds == sorted(kinds, reverse=True)  # reasoning_content comes before content
    message = whole["choices"][0]["message"]
    for name in ("reasoning_content", "content"):
        assert "".join(each.get(name) or "" for each in deltas) == message[name]
    assert last["usage"] == whole["usage"] | {
        "prompt_tokens_details": last["usage"]["prompt_tokens_details"]
    }


def test_the_last_words_of_a_thought_may_be_given(server):
    answer = ask(server, thinking_budget=3, reasoning_budget_message="\nEnough.")
    assert answer["choices"][0]["message"]["reasoning_content"].endswith("\nEnough.\n")


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "fields", [{"reasoning_effort": "none"}, {"thinking_budget": 0}, {"enable_thinking": False}]
)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_budget_of_nothing_is_no_thought(server, monkeypatch, fields, is_known):
    if not is_known:  # by the template
        monkeypatch.setattr(server.moe.tokenizer, "chat_template", THINKS.split("{% if")[0])
    answer = ask(server, **fields)
    message = answer["choices"][0]["message"]
    assert not message.get("reasoning_content", "").strip()
    assert message["content"].strip()


def test_a_structure_or_a_call_comes_behind_the_thought(server):
    form: Any = {"structured_outputs": {"choice": ["yes", "no"]}}
    choice = ask(server, thinking_budget=12, **form)["choices"][0]
    assert choice["message"]["content"] in ("yes", "no")
    assert choice["message"]["reasoning_content"].strip()
    assert choice["finish_reason"] == "stop"
    called = ask(server, thinking_budget=12, tools=[TOOL], tool_choice="required")["choices"][0]
    assert called["message"]["tool_calls"][0]["function"]["name"] == "wait"
    assert called["message"]["reasoning_content"].strip()


def test_a_stop_string_ends_a_thought_as_before(server):
    thought = ask(server)["choices"][0]["message"]["reasoning_content"]
    stop = thought[10:16]
    choice = ask(server, thinking_budget=50, stop=[stop])["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["reasoning_content"] == thought[: thought.index(stop)]


def test_anthropics_budget_is_kept(server, tokenizer):
    answer = ask(server, "messages", thinking={"type": "enabled", "budget_tokens": 12})
    thinking, text = answer["content"]
    assert len(ids_of(tokenizer, thinking["thinking"].rstrip("\n"))) in (11, 12)
    assert text["text"].strip()
    answer = ask(server, "messages", thinking={"type": "disabled"})
    assert [block["type"] for block in answer["content"]] == ["text"]


def test_responses_have_a_budget_and_count_reasoning(server):
    for fields in ({"reasoning": {"max_tokens": 12}}, {"reasoning_budget_tokens": 12}):
        answer = ask(server, "responses", **fields)
        assert 12 <= answer["usage"]["output_tokens_details"]["reasoning_tokens"] <= 14
        assert answer["output"][0]["content"][0]["text"].strip()
    answer = ask(server, "responses", reasoning={"effort": "none"})
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


def test_a_kind_without_thoughts_is_not_affected(server, monkeypatch):
    monkeypatch.setattr(server.moe.tokenizer, "chat_template", "{{ messages[0]['content'] }}")
    plain = ask(server)
    assert ask(server, thinking_budget=0)["choices"] == plain["choices"]


@pytest.mark.parametrize("value", [-2, 1.5, "many"])
def test_a_budget_is_a_number_of_tokens(server, value):
    body = {"messages": ASKED, "thinking_budget": value}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
