"""How kinds of models write messages: reasoning, content and calls of tools.

A format says how answers are read, as a `response_template` of transformers, and how a grammar
makes a model write them. What a grammar makes is always read back as the same. A format belongs to
kinds of models by their `model_type`, or to any model whose chat template has certain marks: some
kinds, such as Qwen3, have checkpoints that write calls in another way.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from transformers.utils.chat_parsing.content_parsers import CONTENT_PARSERS

THINK = ("<think>", "</think>")
CALL_WITH_NAME = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
CALL_IN_LIST = {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}}
GEMMA_JSON = "json-of-gemma"
MISTRAL_JSON = "json-of-mistral"
# One that does not end is taken whole, and is no JSON: else each quote in it would be tried.
GEMMA_STRING = re.compile(r'<\|"\|>(.*?)<\|"\|>|"(?:\\.|[^"\\])*(?:"|\Z)', re.DOTALL)
BARE_KEY = re.compile(r'(?<=[{,])\s*([^\s\0"{}\[\],:](?:[^\0"{}\[\],:]*[^\s\0"{}\[\],:])?)\s*:')
THINKING = {"open": THINK[0], "close": THINK[1], "content": "text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How calls are written. NAME stands for the tool, NUMBER for any number, KEY for an
    argument.
    """

    begin: str = ""  # before the first call
    open: str  # before the arguments
    close: str  # behind them
    between: str | None = "\n"  # of two calls; None: a message has one call
    end: str = ""  # behind the last call
    around_value: tuple[str, str] | None = None  # None: the arguments are a JSON object
    between_values: str = ""
    quotes: bool = False  # around values that are strings, where there is something around values


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How the parts of a message begin."""

    calls: CallForm
    reasoning: tuple[str, str] | None = None  # around reasoning that the model begins by itself
    answer: str = ""  # before an answer without calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Some kinds of models, and how they write messages and are read."""

    kinds: tuple[str, ...] = ()  # of models, by `model_type`
    marks: tuple[str, ...] = ()  # all are in the chat template of such a model; none: by kind only
    written: AnswerForm
    read: dict[str, Any] | None = None  # a response_template; None: transformers knows one
    # A pattern of calls that such models begin within a thought, which they do not end.
    ends_thought: str = ""


def in_json(open_: str, close: str, **fields: Any) -> AnswerForm:
    """Calls whose arguments are a JSON object."""
    return AnswerForm(calls=CallForm(open=open_, close=close, **fields))


def template(
    start_anchor: str | list[str],
    calls: dict[str, Any],
    *,
    thinking: dict[str, Any] | None = THINKING,
    **content: Any,
) -> dict[str, Any]:
    """A response_template. `calls` and `content`: what these fields have beside the usual."""
    fields: dict[str, Any] = {"thinking": thinking} if thinking is not None else {}
    fields["content"] = {"content": "text"} | content
    fields["tool_calls"] = {"repeats": True, "transform": CALL_WITH_NAME} | calls
    return {"start_anchor": start_anchor, "fields": fields}


def in_tags(tag_pattern: str) -> dict[str, Any]:
    """Arguments of which each is between tags."""
    return {"content": "xml-inline", "content_args": {"tag_pattern": tag_pattern}}


def json_of_gemma(text: str, args: Any) -> Any:
    """Parse JSON in which keys have no quotes, whatever is in them, and strings have Gemma's.
    Raises ValueError.
    """
    strings: list[str] = []

    def set_aside(match: re.Match[str]) -> str:
        strings.append(match[0] if match[1] is None else json.dumps(match[1]))
        return f"\0{len(strings) - 1}\0"

    rest = GEMMA_STRING.sub(set_aside, text.replace("\0", "\ufffd"))
    quoted = BARE_KEY.sub(lambda match: f"{json.dumps(match[1])}:", rest)
    return json.loads(re.sub("\0(\\d+)\0", lambda match: strings[int(match[1])], quoted))


def json_of_mistral(text: str, args: Any) -> Any:
    """Parse a list of calls, or one, and leave out what the model wrote behind it: nothing but the
    end of the answer closes it. Raises ValueError.
    """
    found, _ = json.JSONDecoder().raw_decode(text.lstrip())
    return found if isinstance(found, list) else [found]


# transformers' own quotes keys of letters only, and "Content-Type" is none.
CONTENT_PARSERS[GEMMA_JSON] = json_of_gemma
CONTENT_PARSERS[MISTRAL_JSON] = json_of_mistral
CHATML = "<|im_start|>assistant\n"
HERMES = in_json('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>")
DEEPSEEK = template(  # the names between bars of V3, and of V3.1
    ["<｜Assistant｜>", "<｜tool▁output▁end｜>", "<｜tool▁outputs▁end｜>"],
    {
        "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>"
        r"(?:function<｜tool▁sep｜>)?(?P<name>(?!function<)[^\n<]+)"
        r"(?:<｜tool▁sep｜>|\n```json\n)",
        "close_pattern": r"(?:\n```)?<｜tool▁call▁end｜>",
        "content": "json",
    },
    close="<｜tool▁calls▁end｜>",
)
GLM = template(
    "<|assistant|>",
    {
        "open_pattern": r"\s*<tool_call>\s*(?P<name>[^\n<]+)",
        "close": "</tool_call>",
        **in_tags(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
    },
)
# The first that fits is taken: by marks, else by kind.
FAMILIES: tuple[Family, ...] = (
    Family(  # Qwen3-Coder, Qwen3.5, Nemotron 3, MiMo-V2, Step 3.5
        kinds=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "nemotron_h",
               "mimo_v2_flash", "step3p7"),
        marks=("<tool_call>", "<function="),
        written=AnswerForm(
            calls=CallForm(
                open="<tool_call>\n<function=NAME>\n",
                around_value=("<parameter=KEY>\n", "\n</parameter>\n"),
                close="</function>\n</tool_call>",
            )
        ),
        read=template(
            CHATML,
            {
                # Qwen3-Coder leaves the first mark out at times.
                "open_pattern": r"\s*(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                **in_tags(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)"
                          # The last spaces are looked at from the first of them only.
                          r"(?:\n?</parameter>|(?:(?<!\s)|(?<=>)|(?<=>\n))\s*\Z)"),
            },
            close_pattern=r"\s*(?:<\|im_end\|>|<\|endoftext\|>)",
        ),
        ends_thought=r"<tool_call>\s*<function=",
    ),
    Family(  # Nemotron Nano 2
        marks=("<TOOLCALL>",),
        written=in_json(
            '{"name": "NAME", "arguments": ', "}",
            begin="<TOOLCALL>[", between=", ", end="]</TOOLCALL>",
        ),
        read=template(
            ["<SPECIAL_11>Assistant\n", CHATML],
            {
                "open_pattern": r"\s*<TOOLCALL>\s*", "close": "</TOOLCALL>", "content": "json",
                "transform": CALL_IN_LIST, "transform_each": True,
            },
        ),
    ),
    Family(  # Kimi-K2, whose class may be that of DeepSeek-V3
        kinds=("kimi_k2", "kimi_k25", "kimi_linear"),
        marks=("<|tool_call_argument_begin|>",),
        written=in_json(
            "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            begin="<|tool_calls_section_begin|>", between="", end="<|tool_calls_section_end|>",
        ),
        read=template(
            "<|im_assistant|>assistant<|im_middle|>",
            {
                "open_pattern": r"\s*(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*"
                r"(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
                "close": "<|tool_call_end|>", "content": "json",
            },
            close="<|tool_calls_section_end|>",
        ),
        ends_thought=r"<\|tool_calls_section_begin\|>",
    ),
    Family(
        kinds=("minimax_m2",),
        marks=("<minimax:tool_call>",),
        written=AnswerForm(
            calls=CallForm(
                begin="<minimax:tool_call>\n", open='<invoke name="NAME">\n',
                around_value=('<parameter name="KEY">', "</parameter>\n"),
                close="</invoke>", end="\n</minimax:tool_call>",
            )
        ),
        read=template(
            "]~b]ai\n",
            {
                "open_pattern": r"\s*(?:<minimax:tool_call>\s*)?"
                r"<invoke name=\"(?P<name>[^\">\n]+)\">",
                "close": "</invoke>",
                **in_tags(
                    r"<parameter name=\"(?P<key>[^\">\n]+)\">"
                    r"(?P<line>\n)?(?P<value>.*?)(?(line)\n?)</parameter>"
                ),
            },
            close_pattern=r"\s*</minimax:tool_call>",
        ),
    ),
    Family(
        kinds=("lfm2", "lfm2_moe", "lfm2_vl"),
        marks=("<|tool_call_start|>",),
        written=AnswerForm(
            calls=CallForm(
                begin="<|tool_call_start|>[", open="NAME(", close=")", between=", ",
                end="]<|tool_call_end|>", around_value=("KEY=", ""), between_values=", ",
                quotes=True,
            )
        ),
        read=template(
            CHATML,
            {
                "open_pattern": r"\s*<\|tool_call_start\|>", "close": "<|tool_call_end|>",
                "content": "python-call-list", "transform": CALL_IN_LIST, "transform_each": True,
            },
        ),
    ),
    Family(
        kinds=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
        marks=("<|tool_call>call:",),
        written=AnswerForm(
            reasoning=("<|channel>thought\n", "<channel|>"),
            # It is read as JSON in which keys may lack quotes.
            calls=CallForm(open="<|tool_call>call:NAME", close="<tool_call|>", between=""),
        ),
        read=template(
            ["<|turn>model\n", "<tool_response|>"],
            {
                "open_pattern": r"<\|tool_call>call:(?P<name>[^\s{<]+)", "close": "<tool_call|>",
                "content": GEMMA_JSON,
            },
            thinking={"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
            close=["<turn|>", "<|tool_response>", "<eos>"],
        ),
    ),
    Family(  # https://cookbook.openai.com/articles/openai-harmony
        kinds=("gpt_oss",),
        written=AnswerForm(
            reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
            answer="<|channel|>final<|message|>",
            calls=CallForm(
                open="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
                close="", between=None,
            ),
        ),
        read=template(
            "<|start|>assistant",
            {
                "open_pattern": r"(?:<\|channel\|>\w+)? to=functions\.(?P<name>[^\s<]+)"
                r"[^{]*<\|message\|>",
                "close": "<|call|>", "content": "json",
            },
            thinking={
                "open": "<|channel|>analysis<|message|>", "close": "<|end|>", "content": "text",
                "repeats": True, "join": "\n",
            },
            # With the kind of a text at times, and without a head at others.
            open_pattern=r"(?:<\|channel\|>(?:final|commentary)(?:\s*(?:<\|constrain\|>)?\s*\w+)?"
            r"|\A|(?<=<\|start\|>assistant))<\|message\|>",
            close=["<|end|>", "<|return|>"], repeats=True, join="\n",
        ),
    ),
    Family(
        marks=("<｜tool▁sep｜>", "```json"),
        kinds=("deepseek_v2", "deepseek_v3"),
        written=in_json(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
        ),
        read=DEEPSEEK,
        ends_thought="<｜tool▁calls▁begin｜>",
    ),
    Family(  # DeepSeek-V3.1
        marks=("<｜tool▁sep｜>",),
        written=in_json(
            "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            between="",
            end="<｜tool▁calls▁end｜>",
        ),
        read=DEEPSEEK,
        ends_thought="<｜tool▁calls▁begin｜>",
    ),
    Family(  # GLM-4.7 and GLM-5
        kinds=("glm4_moe_lite", "glm_moe_dsa", "glm5_next"),
        marks=("</arg_key><arg_value>",),
        written=AnswerForm(
            calls=CallForm(
                open="<tool_call>NAME",
                around_value=("<arg_key>KEY</arg_key><arg_value>", "</arg_value>"),
                close="</tool_call>",
                between="",
            )
        ),
        read=GLM,
    ),
    Family(  # GLM-4.5
        kinds=("glm4_moe", "glm4v_moe"),
        marks=("<arg_key>",),
        written=AnswerForm(
            calls=CallForm(
                open="<tool_call>NAME\n",
                around_value=("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"),
                close="</tool_call>",
            )
        ),
        read=GLM,
    ),
    Family(
        kinds=("mixtral", "mistral"),
        written=in_json(
            '{"name": "NAME", "arguments": ', "}", begin="[TOOL_CALLS] [", between=", ", end="]"
        ),
        read=template(
            "[/INST]",
            {
                "open_pattern": r"\s*\[TOOL_CALLS\]\s*", "close": "</s>", "content": MISTRAL_JSON,
                "transform": CALL_IN_LIST, "transform_each": True,
            },
            thinking=None,
        ),
    ),
    Family(
        kinds=(
            "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl",
            "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe",
        ),
        written=HERMES,
    ),
)  # fmt: skip
# Models that are told in our words how calls are written, since their chat template shows no tools.
TOLD_CALLS = {
    "open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "repeats": True,
    "content": "json", "transform": {"type": "function", "function": "{content}"},
}  # fmt: skip
TOLD = Family(
    written=HERMES,
    read={
        # The end of the prompt, or what begins a thought there.
        "start_anchor_pattern": r"(?=<think>\s*\Z)|(?<!\s)(?<!<think>)(?=\s*\Z)",
        "fields": {
            "thinking": THINKING, "content": {"content": "text"}, "tool_calls": TOLD_CALLS,
        },
    },
)  # fmt: skip


def with_told_calls(spec: dict[str, Any] | None) -> Any:
    """Return a response template, or ours where there is none, with calls as models are told."""
    if spec is None:
        return TOLD.read
    return spec | {"fields": spec["fields"] | {"tool_calls": TOLD_CALLS}}


def family_of(model_type: str, chat_template: str) -> Family | None:
    """None for a model whose format is not known. A chat template without tools and without what
    begins an answer of a kind is of another's making, as ChatML is for Mixtral.
    """
    for family in FAMILIES:
        if family.marks and all(mark in chat_template for mark in family.marks):
            return family
    found = next((family for family in FAMILIES if model_type in family.kinds), None)
    if found is None or found.read is None or not chat_template or shows_tools(chat_template):
        return found
    anchors = found.read["start_anchor"]
    begins = [anchors] if isinstance(anchors, str) else anchors
    return found if any(each.strip() in chat_template for each in begins) else None


def shows_tools(chat_template: object) -> bool:
    """Return True if a chat template, or one of several, has a variable for tools."""
    return re.search(r"\btools\b", str(chat_template)) is not None
