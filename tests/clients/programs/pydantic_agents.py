"""pydantic-ai: chat and the Responses API."""

import asyncio
from typing import Literal

from common import API, LONG, MODEL, PROMPT, V1, City, do
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

wire = {"responses": OpenAIResponsesModel, "chat": OpenAIChatModel}[API]
model = wire(MODEL, provider=OpenAIProvider(base_url=V1, api_key="none"))


def plain():
    assert Agent(model, instructions="Be brief.").run_sync(PROMPT).output


async def streaming(prompt):
    async with Agent(model).run_stream(prompt) as run:
        assert [text async for text in run.stream_text(debounce_by=None)]


def stream():
    asyncio.run(streaming(PROMPT))


def cancel():
    async def cut():
        task = asyncio.create_task(streaming(LONG))
        await asyncio.sleep(2)
        task.cancel()

    asyncio.run(cut())


def tools():
    """The first call is forced by the test: this library lets only a tool for the output be so."""
    cities = []
    agent = Agent(model)

    @agent.tool_plain
    def weather(city: Literal["Graz"]) -> str:
        """The weather of a city."""
        cities.append(city)
        return "rain"

    assert agent.run_sync("What is the weather?").output
    assert set(cities) == {"Graz"}  # it may be called several times at once


def structured():
    assert isinstance(Agent(model, output_type=ToolOutput(City)).run_sync(PROMPT).output, City)
    assert isinstance(Agent(model, output_type=NativeOutput(City)).run_sync(PROMPT).output, City)


do(plain=plain, stream=stream, tools=tools, structured=structured, cancel=cancel)
