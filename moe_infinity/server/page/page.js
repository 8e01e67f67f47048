// What the server is doing, asked of /stats once a second while the page can be seen.

import { describe, startChat } from "./chat.js";
import { countExperts, ExpertMap } from "./draw.js";
import { Numbers } from "./numbers.js";
import { bytes, count, percent, setText } from "./text.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000;
const map = new ExpertMap($("map"));
const numbers = new Numbers();
let key = sessionStorage.getItem("key") ?? "";
let steps = -1; // of the engine, at the last answer
let context = null; // tokens
let timer = null;

function headers() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function get(path) {
  const answer = await fetch(path, { headers: headers() });
  $("door").hidden = answer.status !== 401;
  if (!answer.ok) throw new Error(answer.status === 401 ? "needs an API key" : `error ${answer.status}`);
  return answer.json();
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const stats = await get("stats");
    context ??= (await get("v1/models")).data[0].max_model_len;
    show(stats);
    setText($("state"), "live");
  } catch (error) {
    setText($("state"), error instanceof TypeError ? "not reachable" : error.message);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
}

function show(stats) {
  setText($("model"), stats.model);
  map.show(stats.experts, steps >= 0 && stats.engine.steps !== steps);
  steps = stats.engine.steps;
  setText($("map-text"), map.text());
  $("device-legend").hidden = !("device" in stats.report.tiers);
  numbers.show(stats, performance.now());
  describe({ name: stats.model, text: aboutModel(stats), context });
}

function aboutModel({ report, experts }) {
  const { device, host, disk } = countExperts(experts);
  const all = device + host + disk;
  const dense = Object.values(report.dense_types).reduce((sum, size) => sum + size, 0);
  const where = disk
    ? `Memory holds ${percent((device + host) / all)} of them; the others are read from disk when the model needs them.`
    : "Memory holds all of them.";
  return `${bytes(dense + report.tiers.disk.capacity_bytes)} of weights, ${count(all)} experts ` +
    `in ${experts.length} layers. ${where} A chat may have ${count(context)} tokens.`;
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("key", key);
  $("door").hidden = true;
  $("words").focus();
  poll();
});
document.addEventListener("visibilitychange", poll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  map.repaint();
  numbers.draw();
});
addEventListener("resize", () => numbers.draw());
startChat(headers);
poll();
