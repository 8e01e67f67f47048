"""OpenAI's agents: the Responses API, which is their default, and chat."""

import asyncio
from typing import Literal

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import API, LONG, MODEL, PROMPT, V1, City, do
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

set_tracing_disabled(True)
is_answered = asyncio.Event()


async def note_answer(_):
    is_answered.set()


http = DefaultAsyncHttpxClient(event_hooks={"response": [note_answer]})
wire = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}[API]
model = wire(MODEL, AsyncOpenAI(base_url=V1, api_key="none", max_retries=0, http_client=http))
cities = []


@function_tool
def weather(city: Literal["Graz"]) -> str:
    """The weather of a city."""
    cities.append(city)
    return "rain"


def plain():
    assert Runner.run_sync(
        Agent(name="a", instructions="Be brief.", model=model), PROMPT
    ).final_output


def stream():
    async def streaming():
        run = Runner.run_streamed(Agent(name="a", model=model), PROMPT)
        return [event async for event in run.stream_events()]

    assert asyncio.run(streaming())


def cancel():
    async def cut():
        run = Runner.run_streamed(Agent(name="a", model=model), LONG)
        await is_answered.wait()  # with headers, long before the prompt is read
        run.cancel()
        async for _ in run.stream_events():
            pass

    asyncio.run(cut())


def tools():
    settings = ModelSettings(tool_choice="required")
    other = Agent(name="other", model=model, handoff_description="knows more")
    agent = Agent(name="a", model=model, tools=[weather], model_settings=settings)
    assert Runner.run_sync(agent, "What is the weather?").final_output is not None
    assert cities
    Runner.run_sync(Agent(name="b", model=model, handoffs=[other]), PROMPT)


def structured():
    agent = Agent(name="a", model=model, output_type=City)
    assert isinstance(Runner.run_sync(agent, PROMPT).final_output, City)


do(plain=plain, stream=stream, tools=tools, structured=structured, cancel=cancel)
