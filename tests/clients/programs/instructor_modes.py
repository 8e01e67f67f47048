"""instructor: each of its modes for these APIs."""

import instructor
from anthropic import Anthropic
from common import API, MODEL, PROMPT, URL, V1, City, do
from openai import OpenAI

MODES = {
    "chat": ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"],
    "responses": ["RESPONSES_TOOLS"],
    "messages": ["ANTHROPIC_TOOLS"],
}[API]
messages = [{"role": "user", "content": PROMPT}]


def structured():
    for name in MODES:
        mode = instructor.Mode[name]
        if API == "messages":
            own = Anthropic(base_url=URL, api_key="none", max_retries=0)
            client = instructor.from_anthropic(own, mode=mode)
        else:
            client = instructor.from_openai(OpenAI(base_url=V1, api_key="none"), mode=mode)
        more = {"max_tokens": 200} if API == "messages" else {}
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, response_model=City, max_retries=1, **more
        )
        assert isinstance(answer, City), name


do(structured=structured)
