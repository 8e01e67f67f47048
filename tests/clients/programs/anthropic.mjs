// Anthropic's package for Node.
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import { jsonSchemaOutputFormat } from "@anthropic-ai/sdk/helpers/json-schema";
import { check, long, model, only, prompt, run, url } from "./common.mjs";

const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: prompt }];
const given = { model, max_tokens: 100, messages };

await run({
  plain: async () => {
    check((await client.messages.create(given)).role === "assistant", "an answer");
    check((await client.messages.countTokens({ model, messages })).input_tokens > 0, "a count");
    for await (const each of client.models.list()) check(each.id && each.display_name, "a model");
  },
  stream: async () => {
    const message = await client.messages.stream(given).finalMessage();
    check(message.stop_reason, "an end");
  },
  tools: async () => {
    let calls = 0;
    const runner = client.beta.messages.toolRunner({
      ...given,
      tools: [
        betaTool({
          name: "weather",
          description: "The weather of a city",
          inputSchema: only,
          run: () => ((calls += 1), "rain"),
        }),
      ],
      tool_choice: { type: "tool", name: "weather" },
      max_iterations: 2,
    });
    await runner.runUntilDone();
    check(calls > 0, "a call");
  },
  structured: async () => {
    const format = jsonSchemaOutputFormat(only);
    const answer = await client.messages.parse({ ...given, output_config: { format } });
    check(answer.parsed_output.city === "Graz", "parsed");
  },
  cancel: async () => {
    const stream = client.messages.stream({ ...given, messages: [{ role: "user", content: long }] });
    setTimeout(() => stream.abort(), 2000);
    try {
      await stream.finalMessage();
    } catch (error) {
      check(error instanceof Anthropic.APIUserAbortError, error);
    }
  },
});
