// The conversation that is shown: asked through /v1/chat/completions, kept by store.js.

import { ConversationList } from "./list.js";
import { button, drawn, part } from "./messages.js";
import { requestWith, startSettings } from "./settings.js";
import { conversations, keep, newConversation, remove, titleOf } from "./store.js";
import { add, chunks } from "./stream.js";
import { setText } from "./text.js";

const EXAMPLES = ["What is a fever?", "How does a ship sail?"];
const UNDO_MS = 15_000;
const $ = (id) => document.getElementById(id);
let headersOf = () => ({});
let about = { name: "", text: "", context: Infinity }; // of the model; its context in tokens
let list = null;
// Its messages: {role, content} of the user; of the model {content, reasoning, calls, end, error,
// tokens, note}, where `end` is one of done, cut, full, thinking, stopped and error.
let conversation = newConversation();
let running = null; // what stops the answer under way
let edited = -1; // the index of the message that is being edited

export function startChat(headers) {
  headersOf = headers;
  startSettings();
  list = new ConversationList(open, removeWithUndo);
  conversation = conversations()[0] ?? conversation;
  redraw();
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else if (ask($("words").value)) $("words").value = "";
  });
  $("words").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) $("ask").requestSubmit();
  });
  $("new").addEventListener("click", () => {
    open(newConversation());
    $("words").focus();
  });
  addEventListener("pagehide", () => running && keep(conversation));
}

// What the empty conversation says of the model.
export function describe(model) {
  about = model;
  const [name, text] = $("talk").querySelectorAll(".start h3, .start p");
  if (!name) return;
  setText(name, about.name);
  setText(text, about.text);
}

function open(other) {
  running?.abort();
  running = null;
  edited = -1;
  conversation = other;
  redraw();
}

function keepAll() {
  if (!keep(conversation)) say("The browser has no room to keep the conversation.");
}

function say(text) {
  $("chat-state").textContent = text;
}

// undo

let undoing = null;

// Offer to call `restore`, for a while.
function offerUndo(text, restore) {
  clearTimeout(undoing);
  const [span, undo] = $("undo").children;
  span.textContent = text;
  $("undo").hidden = false;
  undo.onclick = () => {
    $("undo").hidden = true;
    restore();
  };
  undoing = setTimeout(() => ($("undo").hidden = true), UNDO_MS);
}

function removeWithUndo(other) {
  const isCurrent = other.id === conversation.id;
  const removed = isCurrent ? conversation : other;
  if (isCurrent) open(newConversation());
  remove(removed);
  list.show(conversation);
  offerUndo(`Deleted “${titleOf(removed)}”.`, () => {
    keep(removed);
    open(removed);
  });
}

// Leave out the messages from this one on.
function cutBefore(index) {
  const { messages } = conversation;
  const before = messages.slice();
  const cut = conversation;
  conversation.messages = messages.slice(0, index);
  if (index < before.length - 1)
    offerUndo("The messages after it were left out.", () => {
      open(cut);
      cut.messages = before;
      keepAll();
      redraw();
    });
}

// asking

// Returns whether there was something to ask.
function ask(words) {
  const text = words.trim();
  if (!text || running) return false;
  conversation.messages.push({ role: "user", content: text });
  answer();
  return true;
}

function retry() {
  conversation.messages.pop();
  answer();
}

// What the server is told: turns whose answer is empty are left out.
function history() {
  const told = [];
  for (const { role, content } of conversation.messages) {
    if (role === "user" && told.at(-1)?.role === "user") told.pop();
    if (content) told.push({ role, content });
  }
  return told;
}

function answer() {
  const body = requestWith(history());
  const message = { role: "assistant", content: "", reasoning: "", calls: [] };
  conversation.messages.push(message);
  return receive(body, message);
}

// Go on with the last answer.
function goOn() {
  const message = conversation.messages.at(-1);
  const body = requestWith(history());
  if (message.reasoning) body.messages.at(-1).reasoning_content = message.reasoning;
  return receive({ ...body, add_generation_prompt: false, continue_final_message: true }, message);
}

async function receive(body, message) {
  const mine = running = new AbortController();
  const of = conversation;
  edited = -1;
  Object.assign(message, { end: "stopped", error: undefined, note: undefined });
  of.changed = Date.now();
  keepAll();
  redraw();
  toEnd();
  say("The model reads the prompt.");
  const began = performance.now();
  let first = null;
  try {
    for await (const chunk of chunks(body, headersOf(), mine.signal)) {
      if (!chunk.prompt_progress && chunk.choices[0]?.delta?.content) first ??= performance.now();
      add(message, chunk);
      if (chunk.usage) noteUsage(message, chunk.usage, began, first ?? performance.now());
      if (of === conversation) drawLast();
    }
    if (message.end === "stopped") message.end = "done"; // without token counts
  } catch (error) {
    if (!mine.signal.aborted) Object.assign(message, { end: "error", error: error.message });
  }
  delete message.progress;
  if (running === mine) running = null;
  if (!of.messages.includes(message)) return; // left out meanwhile
  if (of !== conversation) {
    if (conversations().some((each) => each.id === of.id)) keep(of);
    return;
  }
  keepAll();
  redraw();
  say(message.error ? `Error: ${message.error}` : ends[message.end]);
  if (document.activeElement === document.body) $("words").focus();
}

const ends = {
  done: "The answer is complete.",
  cut: "The answer was cut off.",
  full: "The answer was cut off: the context is full.",
  thinking: "The limit of tokens was reached before the answer.",
  stopped: "The answer was stopped.",
};

function noteUsage(message, usage, began, first) {
  const tokens = usage.completion_tokens;
  const now = performance.now();
  const isFull = usage.prompt_tokens + tokens >= about.context;
  message.end = message.finish !== "length" ? "done" : isFull ? "full" : message.content ? "cut" : "thinking";
  message.tokens = (message.tokens ?? 0) + tokens;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const speed = tokens > 1 && now > first ? ` · ${((tokens - 1) / ((now - first) / 1000)).toFixed(1)} tokens/s` : "";
  message.note = `${message.tokens} tokens${speed} · first after ${((first - began) / 1000).toFixed(2)} s · ` +
    `${usage.prompt_tokens} of the prompt${cached ? `, ${cached} known before` : ""}`;
}

// drawing

function redraw() {
  const { messages } = conversation;
  const isAtEnd = isTalkAtEnd();
  $("talk").replaceChildren(...messages.map((message, i) => (i === edited ? editor(i) : drawnAt(i))));
  if (!messages.length) $("talk").append(start());
  $("chat-title").textContent = titleOf(conversation);
  $("send").className = running ? "stops" : "";
  $("send").title = running ? "Stop" : "Send";
  $("send").setAttribute("aria-label", $("send").title);
  $("talk").setAttribute("aria-busy", String(running !== null));
  list.show(conversation);
  if (isAtEnd) toEnd();
}

function toEnd() {
  $("talk").scrollTop = $("talk").scrollHeight;
}

function isTalkAtEnd() {
  const talk = $("talk");
  return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
}

function drawnAt(index) {
  const message = conversation.messages[index];
  const isLast = index === conversation.messages.length - 1;
  const actions = [];
  if (!running && message.role === "user") actions.push(["Edit", () => edit(index)]);
  if (!running && isLast) {
    if (message.role === "user") actions.push(["Ask again", answer]);
    else {
      if (message.content && ["cut", "stopped", "error"].includes(message.end)) actions.push(["Continue", goOn]);
      actions.push(["Retry", retry]);
    }
  }
  return drawn(message, actions, running !== null && isLast);
}

function edit(index) {
  edited = index;
  redraw();
  $("talk").querySelector("textarea")?.focus();
}

function editor(index) {
  const form = document.createElement("form");
  form.className = "message user";
  const area = part(form, "textarea", "", "");
  area.value = conversation.messages[index].content;
  area.setAttribute("aria-label", "The message");
  const buttons = part(form, "div", "buttons", "");
  part(buttons, "button", "", "Send");
  button(buttons, "Cancel", () => edit(-1));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!area.value.trim()) return;
    cutBefore(index);
    ask(area.value);
  });
  return form;
}

function start() {
  const box = document.createElement("div");
  box.className = "start";
  part(box, "h3", "", about.name);
  part(box, "p", "", about.text);
  for (const words of EXAMPLES) button(box, words, () => ask(words));
  return box;
}

let isWaiting = false; // for the browser to draw

function drawLast() {
  if (isWaiting) return;
  isWaiting = true;
  setTimeout(() => {
    isWaiting = false;
    if (running === null || !conversation.messages.length) return;
    const isAtEnd = isTalkAtEnd();
    $("talk").lastElementChild?.replaceWith(drawnAt(conversation.messages.length - 1));
    if (isAtEnd) toEnd();
  }, 50);
}
