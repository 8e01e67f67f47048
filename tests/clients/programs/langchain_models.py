"""LangChain: ChatOpenAI with both of its APIs, and ChatAnthropic."""

import asyncio
from typing import Literal

from common import API, LONG, MODEL, PROMPT, URL, V1, City, do
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

if API == "messages":
    model = ChatAnthropic(model=MODEL, base_url=URL, api_key="none", max_retries=0, max_tokens=64)
else:
    uses = API == "responses"
    model = ChatOpenAI(
        model=MODEL, base_url=V1, api_key="none", max_retries=0, use_responses_api=uses
    )
messages = [SystemMessage("Be brief."), HumanMessage("What is the weather?")]


@tool
def weather(city: Literal["Graz"]) -> str:
    """The weather of a city."""
    return "rain"


def plain():
    assert model.invoke(PROMPT).content
    assert model.batch([PROMPT, PROMPT])


def stream():
    assert len(list(model.stream(PROMPT))) > 1


def cancel():
    async def stream():
        async for _ in model.astream(LONG):
            pass

    async def cut():
        task = asyncio.create_task(stream())
        await asyncio.sleep(2)
        task.cancel()

    asyncio.run(cut())


def tools():
    forced = model.bind_tools([weather], tool_choice="weather")
    asked = forced.invoke(messages)
    call = asked.tool_calls[0]
    assert call["args"]["city"] == "Graz"  # the schema allows more
    result = ToolMessage("rain", tool_call_id=call["id"])
    assert model.bind_tools([weather]).invoke([*messages, asked, result]) is not None
    assert model.bind_tools([weather], tool_choice="any").invoke(messages).tool_calls


def structured():
    methods = ("json_schema", "function_calling") + (() if API == "messages" else ("json_mode",))
    for method in methods[:2]:
        assert isinstance(model.with_structured_output(City, method=method).invoke(PROMPT), City)


do(plain=plain, stream=stream, tools=tools, structured=structured, cancel=cancel)
