"""Fields of other servers' APIs: each is done, refused by name, or known to change no text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import pytest

from moe_infinity import MoE
from moe_infinity.server.anthropic_body import MessagesBody
from moe_infinity.server.chat import ChatBody
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.field_tables import (
    ALWAYS,
    HARMLESS,
    OTHER_NAMES,
    REFUSED,
    SAME,
    SAMPLERS,
    problem_of,
)
from moe_infinity.server.fields import FieldCheck, RequestBody
from moe_infinity.server.llama_cpp import LlamaBody
from moe_infinity.server.prompts import PromptReader
from moe_infinity.server.protocol import STRUCTURES, CompletionBody
from moe_infinity.server.refusals import BadRequest, Refused
from moe_infinity.server.responses_body import ResponsesBody

SAID: list[Any] = [{"role": "user", "content": "w5"}]
REQUIRED: dict[type[RequestBody], dict[str, Any]] = {
    ChatBody: {"messages": SAID},
    CompletionBody: {"prompt": "w5"},
    ResponsesBody: {"input": "w5"},
    MessagesBody: {"messages": SAID, "max_tokens": 4},
}
# By server, what a request may have beside the fields of OpenAI's API.
FIELDS = {
    "llama.cpp": """
        adaptive_decay adaptive_target add_generation_prompt backend_sampling cache_prompt
        chat_format chat_parser chat_template_kwargs continue_final_message dry_allowed_length
        dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent
        dynatemp_range echo generation_prompt grammar grammar_lazy grammar_triggers id_slot
        ignore_eos image_data json_schema lora min_keep min_p mirostat mirostat_eta mirostat_tau
        n_cache_reuse n_cmpl n_discard n_indent n_keep n_predict n_probs parse_tool_calls
        post_sampling_probs preserved_tokens reasoning_budget_message reasoning_budget_tokens
        reasoning_control reasoning_format repeat_last_n repeat_penalty response_fields
        return_progress return_tokens samplers speculative.n_max speculative.n_min
        speculative.p_min sse_ping_interval t_max_predict_ms timings_per_token top_k top_n_sigma
        typical_p verbose xtc_probability xtc_threshold""",
    "vLLM": """
        add_generation_prompt add_special_tokens allowed_token_ids bad_words best_of cache_salt
        chat_template chat_template_kwargs continue_final_message documents echo guided_choice
        guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern
        ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty
        logits_processors logprob_token_ids media_io_kwargs min_p min_tokens mm_processor_kwargs
        priority prompt_embeds prompt_logprobs repetition_detection repetition_penalty request_id
        return_prompt_text return_token_ids return_tokens_as_token_ids session_id
        skip_special_tokens spaces_between_special_tokens stop_token_ids stream_interval
        structural_tag structured_outputs thinking_token_budget top_k truncate_prompt_tokens
        truncation_side use_beam_search vllm_xargs watermarking""",
    "SGLang": """
        cache_salt continue_final_message custom_logit_processor custom_params ebnf extra_key
        ignore_eos input_embeds json_schema lora_path min_p min_tokens no_stop_trim priority regex
        repetition_penalty return_cached_tokens_details return_hidden_states
        return_routed_experts rid routed_dp_rank separate_reasoning session_params
        skip_special_tokens stop_regex stop_token_ids stream_reasoning top_k""",
    "text-generation-webui": """
        add_bos_token auto_max_new_tokens ban_eos_token character chat_template_str continue_
        custom_stopping_strings custom_token_bans do_sample dry_allowed_length dry_base
        dry_multiplier dry_sequence_breakers dynamic_temperature dynatemp_exponent dynatemp_high
        dynatemp_low early_stopping encoder_repetition_penalty epsilon_cutoff eta_cutoff
        grammar_string guidance_scale impersonate instruction_template instruction_template_str
        length_penalty max_new_tokens max_tokens_second min_length min_p mirostat_eta
        mirostat_mode mirostat_tau mode negative_prompt no_repeat_ngram_size num_beams
        penalty_alpha preset prompt_lookup_num_tokens repetition_penalty repetition_penalty_range
        sampler_priority skip_special_tokens smoothing_curve smoothing_factor stopping_strings
        temperature_last tfs top_a top_k top_n_sigma truncation_length typical_p xtc_probability
        xtc_threshold""",
    "TabbyAPI": """
        add_bos_token allowed_tokens ban_eos_token banned_strings banned_tokens cfg_scale dry_range
        generate_window grammar_string json_schema max_length max_temp min_length min_temp
        mirostat_mode negative_prompt penalty_range regex_pattern rep_pen rep_pen_range
        repetition_decay repetition_range skew speculative_ngram stop_sequence temp_exponent
        temperature_last token_healing typical""",
    "Aphrodite": """
        custom_token_bans dynatemp_max dynatemp_min nsigma sampler_order skew token_ban_ranges
        top_a xtc_probability""",
    "KoboldCpp": """
        banned_tokens bypass_eos dynatemp_range genkey grammar images logit_bias
        max_context_length max_length memory mirostat nsigma quiet rep_pen rep_pen_range
        rep_pen_slope render_special sampler_order sampler_seed singleline smoothing_factor
        stop_sequence tfs trim_stop typical use_default_badwordsids""",
    "TGI": """
        adapter_id best_of decoder_input_details details do_sample frequency_penalty grammar
        max_new_tokens repetition_penalty return_full_text top_n_tokens truncate typical_p
        watermark""",
    "LM Studio and MLX": "adapters draft_model num_draft_tokens repetition_context_size ttl",
    "transformers": """
        bad_words_ids begin_suppress_tokens cache_implementation diversity_penalty
        encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
        force_words_ids forced_bos_token_id forced_decoder_ids forced_eos_token_id max_time
        min_new_tokens num_beam_groups num_return_sequences pad_token_id sequence_bias
        stop_strings suppress_tokens top_h use_cache""",
}
# Left out with a line in the log. Clients send the first lines with every request: the order of
# samplers, and how far a penalty reaches back.
LOGGED = """
    penalty_range rep_pen_range rep_pen_slope repeat_last_n repetition_context_size
    repetition_penalty_range repetition_range sampler_order sampler_priority samplers
    temperature_last use_default_badwordsids
    chat_format chat_parser generation_prompt parse_tool_calls preserved_tokens reasoning_control
    reasoning_format separate_reasoning stream_reasoning mode auto_max_new_tokens
    post_sampling_probs prompt_logprobs
    custom_params decoder_input_details details extra_key logprob_token_ids
    return_cached_tokens_details return_hidden_states return_prompt_text return_routed_experts
    return_token_ids
    return_tokens_as_token_ids routed_dp_rank top_n_tokens vllm_xargs
"""


def checked(kind: type[RequestBody], fields: dict[str, Any]) -> tuple[Any, set[str]]:
    """A body, and what a check of its fields wrote into the log."""
    body = kind.model_validate(REQUIRED[kind] | fields)
    check = FieldCheck(is_strict=False)
    check.apply(body)
    return body, check._logged


@pytest.mark.parametrize("server", FIELDS)
def test_each_field_of_a_server_is_decided_on(server):
    bodies: Iterable[Any] = (ChatBody, CompletionBody, LlamaBody)
    done = {name for body in bodies for name in body.model_fields} | {*OTHER_NAMES, *STRUCTURES}
    decided = done | HARMLESS | REFUSED.keys() | SAMPLERS.keys() | ALWAYS.keys()
    names = set(FIELDS[server].split())
    assert names - decided == names & set(LOGGED.split())


def test_no_field_is_in_two_tables():
    refused = [*REFUSED, *SAMPLERS]
    assert len(refused) == len(set(refused))
    assert not HARMLESS & (REFUSED.keys() | SAMPLERS.keys() | ALWAYS.keys() | OTHER_NAMES.keys())
    names = [name for line in SAME for name in line]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", REQUIRED)
@pytest.mark.parametrize(
    ("name", "value", "off"),
    [
        ("banned_strings", ["x"], []),
        ("banned_tokens", [5], []),
        ("custom_token_bans", "5,6", ""),
        ("bad_words_ids", [[5]], []),
        ("suppress_tokens", [5], []),
        ("sequence_bias", [[[5], 1.0]], []),
        ("nsigma", 1.5, 0),
        ("cfg_scale", 2.0, 1),
        ("negative_prompt", "x", ""),
        ("skew", 0.5, 0),
        ("dynatemp_low", 0.5, 1),
        ("dynatemp_high", 2, 1.0),
        ("dynatemp_range", 0.5, 0),
        ("forced_eos_token_id", 5, None),
        ("forced_eos_token_id", 0, None),
        ("forced_bos_token_id", [5], []),
        ("eos_token_id", 0, None),
        ("truncate", 5, None),
        ("token_healing", True, False),
        ("watermark", True, False),
        ("max_time", 1.5, None),
        ("t_max_predict_ms", 100, -1),
        ("n_indent", 4, 0),
        ("min_keep", 2, 1),
        ("system_prompt", "x", ""),
        ("skip_special_tokens", False, True),
        ("custom_stopping_strings", '"a", "b"', ""),
    ],
)
def test_what_would_change_an_answer_is_refused_by_name(kind, name, value, off):
    with pytest.raises(Refused) as refused:
        checked(kind, {name: value})
    assert (refused.value.status_code, refused.value.error.param) == (400, name)
    for without_effect in (off, None):
        assert checked(kind, {name: without_effect})[1] == set()


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
@pytest.mark.parametrize(
    ("fields", "own", "value"),
    [
        ({"ban_eos_token": True}, "ignore_eos", True),
        ({"stopping_strings": ["x"]}, "stop", ["x"]),
        ({"custom_stopping_strings": ["x"]}, "stop", ["x"]),
        ({"stop_sequence": "x"}, "stop", "x"),
        ({"stop_sequences": ["x"], "stop": ["x"]}, "stop", ["x"]),
        ({"stop_strings": ["x"], "stop": []}, "stop", ["x"]),
        ({"rep_pen": 1.2, "repeat_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"min_length": 3}, "min_tokens", 3),
        ({"max_output_tokens": 3.0}, "max_tokens", 3),
        ({"max_length": 3, "max_new_tokens": 3, "max_tokens": None}, "max_tokens", 3),
        ({"num_return_sequences": 2}, "n", 2),
        ({"sampler_seed": 4}, "seed", 4),
        ({"seed": -1}, "seed", None),
        ({"typical": 0.5}, "typical_p", 0.5),
        ({"grammar_string": 'root ::= "a"'}, "structured_outputs.grammar", 'root ::= "a"'),
        ({"regex_pattern": "a"}, "structured_outputs.regex", "a"),
    ],
)
def test_other_names_are_read(kind, fields, own, value):
    body, logged = checked(kind, fields)
    for name in own.split("."):
        body = getattr(body, name)
    assert (body, logged) == (value, set())


def test_other_names_are_those_of_the_bodys_own_field():
    assert checked(ResponsesBody, {"max_tokens": 3})[0].max_output_tokens == 3
    assert checked(MessagesBody, {"ban_eos_token": True})[0].ignore_eos
    assert checked(CompletionBody, {"return_full_text": True})[0].echo
    assert checked(ChatBody, {"continue_": True})[0].is_continued
    assert checked(ChatBody, {"think": False})[0].thought_budget == 0
    assert checked(ChatBody, {"think": "low"})[0].template_hints["reasoning_effort"] == "low"
    with pytest.raises(Refused, match="return_full_text"):
        checked(ChatBody, {"return_full_text": True})
    for name in ("n", "num_return_sequences"):
        with pytest.raises(Refused, match=f"{name}: an answer comes alone"):
            checked(ResponsesBody, {name: 2})


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"rep_pen": 1.2, "repetition_penalty": 1.1}, "rep_pen"),
        ({"repetition_penalty": 1.1, "rep_pen": 1.2}, "rep_pen"),
        ({"max_new_tokens": 3, "max_length": 4}, "max_length"),
        ({"ignore_eos": False, "ban_eos_token": True}, "ban_eos_token"),
        ({"stop": "a", "stop_sequence": ["b"]}, "stop_sequence"),
    ],
)
def test_two_names_with_different_values_are_refused(fields, name):
    with pytest.raises(BadRequest) as refused:
        checked(ChatBody, fields)
    assert refused.value.error.param == name


def test_messages_have_two_fields_for_stop_strings_which_agree():
    both = {"stop": ["a"], "stop_sequences": ["a"]}
    assert checked(MessagesBody, both)[0].for_chat().stops == ("a",)
    with pytest.raises(BadRequest, match="stop: this and stop_sequences"):
        checked(MessagesBody, both | {"stop": "b"})[0].for_chat()


def test_a_prompt_may_come_without_its_special_tokens(moe: MoE, monkeypatch):
    reader = PromptReader(moe, ServeConfig())
    asked: list[bool] = []

    def text_ids(text: str, param: str, *, has_special: bool) -> list[int]:
        asked.append(has_special)
        return [5]

    monkeypatch.setattr(reader, "text_ids", text_ids)
    for fields in ({}, {"add_special_tokens": False}, {"add_bos_token": False}):
        reader.completion(CompletionBody.model_validate({"prompt": "w5"} | fields))
    assert asked == [True, False, False]
    assert problem_of("add_bos_token", False) is not None  # of a chat
    assert problem_of("add_special_tokens", True) is not None


def completion_of(server: Any, fields: dict[str, Any]) -> httpx.Response:
    ask = {"prompt": "w5 w6", "n_predict": 2, "temperature": 0} | fields
    return httpx.post(f"{server.url}/completion", json=ask, timeout=60)


@pytest.mark.parametrize(
    "fields",
    [
        {"banned_strings": ["w9"]},
        {"t_max_predict_ms": 100},
        {"n_indent": 2},
        {"image_data": [{"id": 1, "data": "AA=="}]},
        {"lora": [{"id": 0, "scale": 1}]},
        {"grammar_lazy": True},
        {"n_cmpl": 2},
        {"prompt": {"prompt_string": "w5", "multimodal_data": ["AA=="]}},
        {"rep_pen": 1.2, "repeat_penalty": 1.3},
        {"max_tokens": 3},
    ],
)
def test_llama_cpps_completion_refuses_what_it_cannot_do(server, fields):
    answer = completion_of(server, fields)
    name = "n" if "n_cmpl" in fields else next(iter(fields))
    assert answer.status_code == 400, answer.text
    named = answer.json()["error"]["param"]
    assert named in (name, "prompt.multimodal_data", "repeat_penalty", "n_predict")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": {"prompt_string": "w5 w6"}},
        {"prompt": {"prompt_string": "w5 w6", "multimodal_data": []}},
        {"n_predict": None, "max_tokens": 2},
        {"verbose": True, "n_discard": 4, "speculative.n_max": 3, "response_fields": ["content"]},
        {"samplers": ["top_k"], "repeat_last_n": 64, "lora": [], "n": 1, "colour": "red"},
        {"banned_strings": [], "t_max_predict_ms": -1, "min_keep": 1, "ban_eos_token": False},
    ],
)
def test_llama_cpps_completion_takes_what_its_clients_send(server, fields):
    answer = completion_of(server, fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"] == completion_of(server, {}).json()["content"]


def test_log_probabilities_have_another_name_in_llama_cpps_completion(server):
    answer = completion_of(server, {"logprobs": 1}).json()
    assert len(answer["completion_probabilities"]) == 2


@pytest.mark.parametrize("path", ["v1/responses", "v1/chat/completions"])
def test_a_choice_of_a_tool_that_is_left_out_is_refused_with_its_type(server, path):
    said = {"input": "w5"} if path == "v1/responses" else {"messages": SAID}
    ask = said | {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}
    answer = httpx.post(f"{server.url}/{path}", json=ask, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "tool_choice"
    assert "a tool of type 'web_search' is left out" in error["message"]
