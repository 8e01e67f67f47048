// OpenAI's package for Node: chat and responses.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { api, check, long, model, only, prompt, run, v1 } from "./common.mjs";

const client = new OpenAI({ baseURL: v1, apiKey: "none", maxRetries: 0 });
const City = z.object({ name: z.enum(["Graz", "Linz"]), size: z.literal(1) });
const messages = [{ role: "user", content: prompt }];
const isChat = api === "chat";
const tool = { type: "function", function: { name: "weather", strict: true, parameters: only } };

const create = (more, options) =>
  isChat
    ? client.chat.completions.create({ model, messages, ...more }, options)
    : client.responses.create({ model, input: messages, ...more }, options);

async function tools() {
  if (!isChat) {
    const { function: own, type } = tool;
    const first = await create({ tools: [{ type, ...own }], tool_choice: "required" });
    const call = first.output.find((item) => item.type === "function_call");
    check(JSON.parse(call.arguments).city === "Graz", call.arguments);
    const result = { type: "function_call_output", call_id: call.call_id, output: "rain" };
    const input = [...messages, ...first.output, result];
    check((await client.responses.create({ model, input })).status, "the second turn");
    return;
  }
  const first = await create({ tools: [tool], tool_choice: "required" });
  const message = first.choices[0].message;
  const call = message.tool_calls[0];
  check(JSON.parse(call.function.arguments).city === "Graz", call.function.arguments);
  const results = message.tool_calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: "rain" }));
  const next = { model, messages: [...messages, message, ...results], tools: [tool] };
  check((await client.chat.completions.create(next)).choices.length === 1, "the second turn");
}

await run({
  plain: async () => check((await create({})).id, "an answer"),
  stream: async () => {
    let events = 0;
    for await (const event of await create({ stream: true })) events += event ? 1 : 0;
    check(events > 1, events);
  },
  tools,
  structured: async () => {
    if (isChat) {
      const response_format = zodResponseFormat(City, "city");
      const answer = await client.chat.completions.parse({ model, messages, response_format });
      check(answer.choices[0].message.parsed.size === 1, "parsed");
    } else {
      const text = { format: zodTextFormat(City, "city") };
      const answer = await client.responses.parse({ model, input: messages, text });
      check(answer.output_parsed.size === 1, "parsed");
    }
  },
  cancel: async () => {
    const controller = new AbortController();
    setTimeout(() => controller.abort(), 2000);
    const content = { messages: [{ role: "user", content: long }], input: long };
    const given = isChat ? { messages: content.messages } : { input: content.input };
    try {
      for await (const _ of await create({ ...given, stream: true }, controller)) continue;
    } catch (error) {
      check(controller.signal.aborted, error);
    }
  },
});
