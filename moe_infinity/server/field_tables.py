"""Tables of the fields of requests, also of other servers' APIs. `fields` applies them."""

from __future__ import annotations

from typing import Any

EMPTY: tuple[Any, ...] = (None, "", [], {})

# Names that servers and libraries have for the same. A body reads each as the first of its line
# that it declares.
SAME: tuple[tuple[str, ...], ...] = (
    (
        "max_tokens", "max_output_tokens", "max_completion_tokens", "max_new_tokens", "max_length",
        "n_predict", "num_predict",
    ),
    ("min_tokens", "min_new_tokens", "min_length"),
    (
        "stop", "stop_sequences", "stop_sequence", "stop_strings", "stopping_strings",
        "custom_stopping_strings",
    ),
    ("ignore_eos", "ban_eos_token", "bypass_eos"),
    ("n", "num_return_sequences", "n_cmpl"),
    ("repetition_penalty", "repeat_penalty", "rep_pen"),
    ("typical_p", "typical"),
    ("seed", "random_seed", "sampler_seed", "sampling_seed"),
    ("echo", "return_full_text"),
    ("add_special_tokens", "add_special", "add_bos_token"),
    ("continue_final_message", "continue_"),
    (  # llama.cpp has the first two, vLLM the third, Qwen's API the next
        "reasoning_budget_tokens", "thinking_budget_tokens", "thinking_token_budget",
        "thinking_budget", "reasoning_budget",
    ),
)  # fmt: skip
OTHER_NAMES = {name: line for line in SAME for name in line}
# At any level of a body.
HARMLESS = {
    # bookkeeping of clients and of those who forward requests
    "client_metadata", "created", "created_at", "created_by", "diagnostics", "extra_body",
    "extra_headers", "extra_query", "id", "inference_geo", "keep_alive", "litellm_metadata",
    "metadata", "moderation", "phase", "priority", "provider", "provider_specific_fields",
    "request_id", "safety_identifier", "service_tier", "session_id", "speed", "status", "store",
    "tags", "timeout", "timestamp", "trace_id", "transforms", "user", "user_id",
    "user_profile_id", "workspace_id", "access_programs", "billing_policy", "background_options",
    "fallback_credit_token", "fallbacks", "api_server", "api_type", "genkey", "legacy_api", "quiet",
    "rid", "ttl",
    # hints for caches and speed: prefixes are kept in any case
    "cache_control", "cache_prompt", "cache_salt", "id_slot", "kv_transfer_params", "n_keep",
    "prediction", "prompt_cache_breakpoint", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "slot_id", "cache_implementation", "n_cache_reuse", "use_cache",
    "draft_model", "num_draft_tokens", "prompt_lookup_num_tokens", "speculative.n_max",
    "speculative.n_min", "speculative.p_min", "speculative.type", "speculative_ngram",
    "guided_decoding_backend", "backend_sampling", "max_tokens_second",
    # what is done with a prompt that is too long, which is refused, and room for it
    "generate_window", "max_context_length", "n_discard", "truncation_length", "truncation_side",
    # settings of samplers and beams that are off
    "adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_range",
    "dry_sequence_breakers", "dynatemp_exponent", "early_stopping", "length_penalty",
    "mirostat_eta", "mirostat_tau", "pad_token_id", "smoothing_curve", "temp_exponent",
    "xtc_threshold",
    # of earlier answers, beside their text
    "annotations", "block_binding", "caller", "citations", "encrypted_content", "index", "logprobs",
    "parsed", "parsed_arguments", "reasoning_details", "signature", "summary", "thinking_blocks",
    "toolset_name",
    # how tools are sent, and who may call them
    "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples",
    # what a stream or an answer has beside the text
    "betas", "display", "exclude", "include_obfuscation", "include_reasoning", "timings_per_token",
    "response_fields", "spaces_between_special_tokens", "sse_ping_interval", "stream_interval",
    "verbose",
}  # fmt: skip
NOT_KEPT = "nothing is kept between requests: send the whole conversation"
ONLY_TEXT = "this server reads and writes text only"
IN_A_MESSAGE = "put the text into a message"
OTHER_LIMITS = "logit_bias and structured_outputs limit an answer"
NOT_FORBIDDEN = "logit_bias makes tokens unlikely"
NO_ADAPTERS = "adapters are not chosen by requests"
OWN_TEMPLATE = "the template is the model's: chat_template_kwargs sets its variables"
NO_GUIDANCE = "there is no guidance by a second prompt"
# At the top of a body, unless the body declares the field: the reasons, and their fields.
REASONS: dict[str, tuple[str, ...]] = {
    ONLY_TEXT: (
        "audio", "image", "image_data", "images", "input_embeds", "multimodal_data",
        "prompt_embeds",
    ),
    "images are read as the model's processor reads them": (
        "media_io_kwargs", "mm_processor_kwargs",
    ),
    NOT_KEPT: ("previous_response_id", "conversation", "session_params", "thread"),
    "no answer is kept for later: use stream=true": ("background", "deferred"),
    "no prompts are stored here: send the text": ("prompt",),
    "no settings are stored here: send them": ("preset",),
    "give them as the tools of a conversation": ("functions", "function_call", "tools"),
    "what is asked is in another field of this route": ("messages",),
    "no model here fills in text": ("suffix", "input_suffix"),
    OWN_TEMPLATE: (
        "chat_template", "chat_template_str", "instruction_template",
        "instruction_template_str", "add_special_tokens",
    ),
    IN_A_MESSAGE: (
        "character", "documents", "instructions", "memory", "safe_prompt", "system",
        "system_prompt",
    ),
    "the model answers as the assistant": ("impersonate",),
    "only /v1/completions begins an answer with the prompt": ("echo", "return_full_text"),
    "shorten the prompt": ("truncate", "truncate_prompt_tokens"),
    "end the prompt at a word's end": ("token_healing",),
    OTHER_LIMITS: (
        "allowed_token_ids", "allowed_tokens", "custom_logit_processor",
        "exponential_decay_length_penalty", "force_words_ids", "forced_bos_token_id",
        "forced_decoder_ids", "forced_eos_token_id", "logits_processors", "n_indent",
    ),
    "logit_bias makes tokens likely or unlikely": ("sequence_bias",),
    NOT_FORBIDDEN: (
        "bad_words", "bad_words_ids", "banned_strings", "banned_tokens",
        "begin_suppress_tokens", "custom_token_bans", "suppress_tokens", "token_ban_ranges",
    ),
    "no answer is marked": ("watermark", "watermarking"),
    NO_GUIDANCE: ("negative_prompt", "negative_prompt_ids"),
    "structured_outputs has json, regex, choice and grammar": ("structural_tag",),
    "a grammar is that of the whole answer": ("grammar_lazy", "grammar_triggers"),
    "a grammar can say which spaces there are": ("guided_whitespace_pattern",),
    "use response_format or structured_outputs": ("format",),
    NO_ADAPTERS: ("lora", "lora_path", "lora_request", "adapter_id", "adapters"),
    "give a list of strings as stop": ("custom_stopping_strings",),
    "stop_token_ids end an answer, too": ("eos_token_id",),
    "a stop string is never part of the answer": ("include_stop_str_in_output", "no_stop_trim"),
    "stop and max_tokens end an answer": ("repetition_detection",),
    'use stop=["\\n"]': ("singleline",),
    "stop takes strings": ("stop_regex",),
    "max_tokens ends an answer": ("max_time", "t_max_predict_ms"),
    "answers are sampled, and none is chosen among them": ("best_of",),
    "answers are sampled": ("use_beam_search",),
    "an answer comes alone: send the request again": ("n", "num_return_sequences"),
    "special tokens are no part of an answer": ("render_special",),
}  # fmt: skip
REFUSED = {name: why for why, names in REASONS.items() for name in names}
# Their values without effect, beside null, false, 0 and what is empty.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "n": (1,),
    "num_return_sequences": (1,),
    "t_max_predict_ms": (-1,),
    "truncate": (True, "NONE"),  # in embeddings: if need be
    "truncate_prompt_tokens": (-1,),
}
# Samplers that this server has not, and the values with which each has no effect.
SAMPLERS: dict[str, tuple[float, ...]] = {
    "adaptive_target": (-1,),
    "cfg_scale": (1,),
    "diversity_penalty": (0,),
    "dry_multiplier": (0,),
    "dynamic_temperature": (0,),
    "dynatemp_high": (1,),
    "dynatemp_low": (1,),
    "dynatemp_max": (0,),
    "dynatemp_min": (0,),
    "dynatemp_range": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "guidance_scale": (1,),
    "max_temp": (1,),
    "min_keep": (0, 1),
    "min_temp": (1,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "negative_prompt_scale": (1,),
    "nsigma": (-1, 0),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "repetition_decay": (0,),
    "skew": (0,),
    "smoothing_factor": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_h": (1,),
    "top_n_sigma": (-1, 0),
    "xtc_probability": (0,),
}
NO_SAMPLER = "this sampler is not supported: leave it out"
# What is done in any case; false would be a change.
ALWAYS = {
    "add_bos_token": OWN_TEMPLATE,
    "detokenize": "an answer is a text",
    "skip_special_tokens": "special tokens are no part of an answer",
    "trim_stop": "a stop string is never part of the answer",
}
UNDONE = REFUSED.keys() | SAMPLERS.keys() | ALWAYS.keys()


def problem_of(name: str, value: Any) -> str | None:
    """Return why a field cannot be left out; None if it can."""
    if name in ALWAYS:
        return ALWAYS[name] if value == 0 else None
    is_off = value in EMPTY or (value == 0 and not name.endswith("_token_id"))
    if is_off or value in (*SAMPLERS.get(name, ()), *NEUTRAL.get(name, ())):
        return None
    return NO_SAMPLER if name in SAMPLERS else REFUSED.get(name)
