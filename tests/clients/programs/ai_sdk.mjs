// The AI SDK with its provider for servers of OpenAI's API.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { check, long, model as name, prompt, run, v1 } from "./common.mjs";

const provider = createOpenAICompatible({ name: "moe-infinity", baseURL: v1, supportsStructuredOutputs: true });
const given = { model: provider(name), prompt, maxRetries: 0 };
const weather = tool({
  description: "The weather of a city",
  inputSchema: z.object({ city: z.enum(["Graz"]) }),
  execute: async () => "rain",
});

await run({
  plain: async () => check((await generateText(given)).finishReason === "stop", "an answer"),
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
