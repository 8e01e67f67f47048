// How one message of a conversation is drawn.

import { copyButton } from "./code.js";
import { markdown } from "./markdown.js";

const FOLDED_FROM = 1500; // characters of a question
const ENDS = {
  cut: "Cut off: the limit of tokens for an answer was reached.",
  full: "Cut off: the context is full. Begin a new chat, or edit an earlier message.",
  thinking: "Cut off: the limit of tokens was reached before the answer. Raise it in Settings, or turn thinking off.",
  stopped: "Stopped.",
};

// `actions`: [name, function] of each button besides Copy. `isRunning`: the answer is under way.
export function drawn(message, actions, isRunning) {
  const article = document.createElement("article");
  const isMine = message.role === "user";
  article.className = isMine ? "message user" : "message assistant";
  part(article, "b", "who", isMine ? "You" : "Model");
  if (message.reasoning) thoughts(article, message);
  const body = part(article, "div", "content", "");
  body.append(markdown(message.content));
  if (isMine && message.content.length > FOLDED_FROM) clip(article, body, message);
  for (const call of message.calls ?? []) {
    const code = document.createElement("pre");
    code.textContent = call.arguments;
    folded(article, `Calls the tool ${call.name}`, code, true);
  }
  if (isRunning) {
    if (!message.content && !message.reasoning) article.append(waiting(message));
    return article;
  }
  if (message.error) part(article, "div", "error", message.error);
  else if (ENDS[message.end]) part(article, "div", "end", ENDS[message.end]);
  const foot = part(article, "div", "foot", "");
  for (const [name, act] of actions) button(foot, name, act).className = name === "Continue" ? "main" : "";
  if (message.content) foot.append(copyButton(() => message.content));
  if (message.note) part(foot, "span", "note", message.note);
  return article;
}

// How far the prompt is.
function waiting({ progress }) {
  const box = document.createElement("div");
  box.className = "waiting";
  const bar = document.createElement("progress");
  bar.setAttribute("aria-label", "The prompt");
  const text = part(box, "span", "", "Waiting for the server");
  box.prepend(bar);
  if (!progress) return box;
  const { total, processed, cache, time_ms } = progress;
  const count = (number) => number.toLocaleString("en");
  if (processed > 0) {
    bar.max = total;
    bar.value = processed;
  }
  text.textContent = `Reading the prompt: ${count(processed)} of ${count(total)} tokens`;
  const left_s = (total - processed) * time_ms / 1000 / (processed - cache);
  if (time_ms > 2000 && left_s >= 1 && Number.isFinite(left_s)) text.append(`, about ${Math.ceil(left_s)} s left`);
  return box;
}

function clip(article, body, message) {
  body.classList.add("clipped");
  const words = message.content.trim().split(/\s+/).length.toLocaleString("en");
  const more = button(article, `Show all ${words} words`, () => {
    const isClipped = body.classList.toggle("clipped");
    more.textContent = isClipped ? `Show all ${words} words` : "Show less";
    more.setAttribute("aria-expanded", String(!isClipped));
  });
  more.setAttribute("aria-expanded", "false");
}

export function button(parent, name, act) {
  const made = part(parent, "button", "", name);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

export function part(parent, tag, className, text) {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

// Open until the answer itself begins, or as the reader wants them.
function thoughts(article, message) {
  const isOpen = message.showsThoughts ?? !message.content;
  const details = folded(article, "Thoughts", markdown(message.reasoning), isOpen);
  details.firstElementChild.addEventListener("click", () => (message.showsThoughts = !details.open));
}

function folded(parent, title, inner, isOpen) {
  const details = part(parent, "details", "", "");
  details.open = isOpen;
  part(details, "summary", "", title);
  details.append(inner);
  return details;
}
