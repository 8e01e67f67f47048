// Ollama's package, which speaks Ollama's own API.
import { Ollama } from "ollama";
import { check, long, model, only, prompt, run, url } from "./common.mjs";

const client = new Ollama({ host: url });
const messages = [{ role: "user", content: prompt }];

await run({
  plain: async () => {
    check((await client.list()).models[0].name.startsWith(model), "a list");
    check((await client.show({ model })).details, "details");
    check((await client.chat({ model, messages })).done, "an answer");
    check((await client.generate({ model, prompt })).done, "a text");
  },
  stream: async () => {
    let last;
    for await (const part of await client.chat({ model, messages, stream: true })) last = part;
    check(last.done && last.eval_count > 0, "an end");
  },
  structured: async () => {
    const answer = await client.chat({ model, messages, format: only });
    check(JSON.parse(answer.message.content).city === "Graz", answer.message.content);
  },
  cancel: async () => {
    setTimeout(() => client.abort(), 2000);
    try {
      const content = [{ role: "user", content: long }];
      for await (const _ of await client.chat({ model, messages: content, stream: true })) continue;
    } catch (error) {
      check(error.name === "AbortError", error);
    }
  },
});
