// The conversation: asked through /v1/chat/completions, kept in the browser's localStorage.

import { markdown } from "./markdown.js";

const KEPT_AS = "moe-infinity conversation";
const $ = (id) => document.getElementById(id);
let headersOf = () => ({});
let messages = []; // {role, content, reasoning, calls, note, error}
let running = null; // what stops the answer under way

export function startChat(headers) {
  headersOf = headers;
  messages = kept();
  redraw();
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("words").value.trim();
    if (!text || running) return;
    $("words").value = "";
    messages.push({ role: "user", content: text });
    answer();
  });
  $("words").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("retry").addEventListener("click", () => {
    if (running) return;
    if (messages.at(-1)?.role === "assistant") messages.pop();
    answer();
  });
  $("clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    keep();
    redraw();
    $("words").focus();
  });
}

function kept() {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT_AS) ?? "[]");
    return found.filter((each) => typeof each.content === "string");
  } catch {
    return [];
  }
}

function keep() {
  try {
    localStorage.setItem(KEPT_AS, JSON.stringify(messages));
  } catch {
    $("chat-state").textContent = "The browser has no room to keep the conversation.";
  }
}

// What the server is told: turns whose answer is empty are left out.
function history() {
  const told = [];
  for (const { role, content } of messages) {
    if (role === "user" && told.at(-1)?.role === "user") told.pop();
    if (content) told.push({ role, content });
  }
  return told;
}

async function answer() {
  const body = { messages: history(), stream: true, stream_options: { include_usage: true } };
  const message = { role: "assistant", content: "", reasoning: "", calls: [] };
  const mine = running = new AbortController();
  messages.push(message);
  redraw();
  $("chat-state").textContent = "The model answers.";
  const began = performance.now();
  let first = null;
  try {
    for await (const chunk of chunks(body, mine.signal)) {
      first ??= performance.now();
      add(message, chunk.choices[0]?.delta ?? {});
      if (chunk.usage) message.note = noteOf(chunk.usage, began, first, performance.now());
      drawLast();
    }
  } catch (error) {
    if (mine.signal.aborted) message.note = "stopped";
    else message.error = error.message;
  }
  if (running === mine) running = null;
  if (!messages.includes(message)) { // cleared meanwhile
    redraw();
    return;
  }
  keep();
  redraw();
  $("chat-state").textContent = message.error ? `Error: ${message.error}` : "The answer is complete.";
  if (document.activeElement === document.body) $("words").focus();
}

async function* chunks(body, signal) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json", ...headersOf() },
    body: JSON.stringify(body),
  });
  if (!response.ok) {
    const told = await response.json().catch(() => null);
    throw new Error(told?.error?.message ?? `error ${response.status}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part; !(part = await reader.read()).done;) {
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: {")) continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

function add(message, delta) {
  message.content += delta.content ?? "";
  message.reasoning += delta.reasoning_content ?? "";
  for (const { index, function: called } of delta.tool_calls ?? []) {
    const call = message.calls[index] ??= { name: "", arguments: "" };
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
}

function noteOf(usage, began, first, now) {
  const tokens = usage.completion_tokens;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const speed = tokens > 1 ? `, ${((tokens - 1) / ((now - first) / 1000)).toFixed(1)}/s` : "";
  return `${tokens} tokens${speed} · first after ${((first - began) / 1000).toFixed(2)} s · ` +
    `${cached} of ${usage.prompt_tokens} tokens of the prompt from the prefix cache`;
}

// drawing

function redraw() {
  $("talk").replaceChildren(...messages.map(drawn));
  $("send").disabled = running !== null;
  $("stop").disabled = running === null;
  $("retry").disabled = running !== null || messages.length === 0;
  $("talk").scrollTop = $("talk").scrollHeight;
}

let isWaiting = false; // for the browser to draw

function drawLast() {
  if (isWaiting) return;
  isWaiting = true;
  setTimeout(() => {
    isWaiting = false;
    const talk = $("talk");
    if (running === null || !messages.length) return;
    const isAtEnd = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
    talk.lastElementChild?.replaceWith(drawn(messages.at(-1)));
    if (isAtEnd) talk.scrollTop = talk.scrollHeight;
  }, 50);
}

function drawn(message) {
  const article = document.createElement("article");
  const isMine = message.role === "user";
  article.className = isMine ? "message user" : "message assistant";
  part(article, "b", "who", isMine ? "You" : "Model");
  if (message.reasoning) folded(article, "Reasoning", markdown(message.reasoning), !message.content);
  const body = part(article, "div", "content", isMine ? message.content : "");
  if (!isMine) body.append(markdown(message.content));
  for (const call of message.calls ?? []) {
    const code = document.createElement("pre");
    code.textContent = call.arguments;
    folded(article, `Calls the tool ${call.name}`, code, true);
  }
  if (message.error) part(article, "div", "error", message.error);
  if (message.note) part(article, "div", "note", message.note);
  return article;
}

function part(parent, tag, className, text) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

function folded(parent, title, inner, isOpen) {
  const details = part(parent, "details", "", "");
  details.open = isOpen;
  part(details, "summary", "", title);
  details.append(inner);
}
