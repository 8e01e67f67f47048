// The AI SDK with its providers for OpenAI, for servers of OpenAI's API, and for Anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { api, check, long, model as name, prompt, run, v1 } from "./common.mjs";

const provider = {
  chat: createOpenAICompatible({ name: "moe-infinity", baseURL: v1, supportsStructuredOutputs: true }),
  responses: createOpenAI({ baseURL: v1, apiKey: "none" }),
  messages: createAnthropic({ baseURL: v1, apiKey: "none" }),
}[api];
const given = { model: provider(name), prompt, maxRetries: 0 };
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.enum(["Graz"]) }),
  execute: async () => "rain",
});

await run({
  plain: async () => {
    const { prompt: content, ...rest } = given;
    const messages = [{ role: "user", content }];
    for (let turn = 0; turn < 3; turn += 1) {
      const answer = await generateText({ ...rest, messages });
      check(answer.finishReason === "stop", "an answer");
      messages.push(...answer.response.messages, { role: "user", content });
    }
  },
  stream: async () => {
    let pieces = 0;
    for await (const text of streamText(given).textStream) pieces += text ? 1 : 0;
    check(pieces > 0, "pieces");
  },
  tools: async () => {
    const answer = await generateText({
      ...given,
      tools: { weather },
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
    });
    check(answer.steps[0].toolResults.length > 0, "a result");
    check(answer.steps.length === 2, "a second turn");
  },
  structured: async () => {
    const schema = z.object({ city: z.enum(["Graz", "Linz"]) });
    check((await generateObject({ ...given, schema })).object.city, "an object");
  },
  cancel: async () => {
    const controller = new AbortController();
    setTimeout(() => controller.abort(), 2000);
    const stream = streamText({ ...given, prompt: long, abortSignal: controller.signal });
    for await (const _ of stream.textStream) continue;
  },
});
