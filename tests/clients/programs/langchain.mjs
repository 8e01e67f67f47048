// LangChain for JavaScript: chat, the Responses API, messages and Ollama's.
import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage, SystemMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOllama } from "@langchain/ollama";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { api, check, long, model, prompt, run, url, v1 } from "./common.mjs";

const given = { model, apiKey: "none", maxRetries: 0 };
const configuration = { baseURL: v1 };
const chat = {
  chat: () => new ChatOpenAI({ ...given, configuration }),
  responses: () => new ChatOpenAI({ ...given, configuration, useResponsesApi: true }),
  messages: () => new ChatAnthropic({ ...given, anthropicApiUrl: url, maxTokens: 100 }),
  ollama: () => new ChatOllama({ model, maxRetries: 0, baseUrl: url }),
}[api]();
const schema = z.object({ city: z.enum(["Graz"]) });
const weather = tool(async () => "rain", { name: "weather", description: "The weather of a city", schema });

async function joined(stream) {
  let all;
  for await (const part of await stream) all = all === undefined ? part : all.concat(part);
  return all;
}

await run({
  plain: async () => {
    const messages = [new SystemMessage("Be brief."), new HumanMessage(prompt)];
    for (let turn = 0; turn < 3; turn += 1) {
      const answer = await chat.invoke(messages);
      check(answer.usage_metadata.output_tokens > 0, "a count");
      messages.push(answer, new HumanMessage(prompt));
    }
  },
  stream: async () => {
    const messages = [new HumanMessage(prompt)];
    for (let turn = 0; turn < 3; turn += 1) {
      const answer = await joined(chat.stream(messages));
      check(answer.usage_metadata.output_tokens > 0, "a count");
      messages.push(answer, new HumanMessage(prompt));
    }
  },
  tools: async () => {
    const forced = chat.bindTools([weather], { tool_choice: "weather" });
    for (const first of [await forced.invoke(prompt), await joined(forced.stream(prompt))]) {
      check(first.tool_calls[0].args.city === "Graz", "a call");
      const results = first.tool_calls.map(({ id }) => new ToolMessage({ content: "rain", tool_call_id: id }));
      const messages = [new HumanMessage(prompt), first, ...results];
      check((await chat.bindTools([weather]).invoke(messages)).usage_metadata, "the second turn");
    }
  },
  structured: async () => {
    const methods = api === "ollama" ? ["jsonSchema"] : ["functionCalling", "jsonSchema"];
    for (const method of methods) {
      const answer = await chat.withStructuredOutput(schema, { name: "place", method }).invoke(prompt).catch((error) => error);
      // For Anthropic's API the library writes the values into a description.
      const isFree = api === "messages" && method === "jsonSchema";
      check(answer.city === "Graz" || isFree, answer);
    }
  },
  cancel: async () => {
    const controller = new AbortController();
    setTimeout(() => controller.abort(), 2000);
    try {
      await joined(chat.stream(long, { signal: controller.signal }));
    } catch (error) {
      check(error.name === "AbortError", error);
    }
  },
});
