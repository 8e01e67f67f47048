"""LiteLLM: its ways to an OpenAI, a vLLM and an Anthropic server."""

import json

import litellm
from common import API, MODEL, PROMPT, URL, V1, City, do

base = URL if API == "anthropic" else V1
given = {"model": f"{API}/{MODEL}", "api_base": base, "api_key": "none", "max_tokens": 200}
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
only = {"type": "object", "properties": {"city": {"enum": ["Graz"]}}, "required": ["city"]}
tool = {"type": "function", "function": {"name": "weather", "parameters": only}}


def plain():
    answer = litellm.completion(messages=messages, **given)
    sent_back = [*messages, answer.choices[0].message.model_dump(), messages[1]]
    assert litellm.completion(messages=sent_back, **given).choices


def stream():
    assert len(list(litellm.completion(messages=messages, stream=True, **given))) > 1


def tools():
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = litellm.completion(messages=messages, tools=[tool], tool_choice=choice, **given)
    message = answer.choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments)["city"] == "Graz"
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    history = [*messages, message.model_dump(), result]
    assert litellm.completion(messages=history, tools=[tool], **given).choices


def structured():
    answer = litellm.completion(messages=messages, response_format=City, **given)
    City.model_validate_json(answer.choices[0].message.content)


do(plain=plain, stream=stream, tools=tools, structured=structured)
