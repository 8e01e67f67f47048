// The dialog of settings, and the fields of a request that they stand for.

import { keepSettings, settings } from "./store.js";

const $ = (id) => document.getElementById(id);
const fields = () => $("settings").querySelectorAll("textarea, input, select");

export function startSettings() {
  const form = $("settings").querySelector("form");
  for (const field of fields()) field.value = settings()[field.name] ?? "";
  $("open-settings").addEventListener("click", () => $("settings").showModal());
  form.addEventListener("input", take);
  form.addEventListener("reset", () => setTimeout(take)); // after the fields are empty
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    $("settings").close();
  });
  showCount();
}

// Keep what is valid.
function take() {
  const valid = [...fields()].filter((field) => field.value.trim() && field.checkValidity());
  keepSettings(Object.fromEntries(valid.map((field) => [field.name, field.value])));
  showCount();
}

function showCount() {
  const count = Object.keys(settings()).length;
  $("open-settings").textContent = count ? `Settings (${count})` : "Settings";
}

// Fields of a request to /v1/chat/completions with these messages.
export function requestWith(messages) {
  const { system, temperature, max_tokens, thinking } = settings();
  const body = { messages: system ? [{ role: "system", content: system }, ...messages] : messages };
  if (temperature) body.temperature = Number(temperature);
  if (max_tokens) body.max_tokens = Number(max_tokens);
  if (thinking) body.reasoning_effort = thinking;
  return body;
}
