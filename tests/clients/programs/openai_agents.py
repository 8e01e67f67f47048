"""OpenAI's agents: the Responses API, which is their default, and chat."""

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
from openai import AsyncOpenAI

set_tracing_disabled(True)
wire = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}[API]
model = wire(MODEL, AsyncOpenAI(base_url=V1, api_key="none", max_retries=0))
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


async def streaming(prompt, is_cut):
    run = Runner.run_streamed(Agent(name="a", model=model), prompt)
    events = 0
    async for _ in run.stream_events():
        events += 1
        if is_cut:
            run.cancel()
    assert events


def stream():
    import asyncio

    asyncio.run(streaming(PROMPT, is_cut=False))


def cancel():
    import asyncio

    async def cut():
        task = asyncio.create_task(streaming(LONG, is_cut=True))
        await asyncio.sleep(2)
        task.cancel()

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
