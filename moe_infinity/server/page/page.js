// What the server is doing, asked of /stats once a second while the page can be seen.

import { startChat } from "./chat.js";
import { drawLine, ExpertMap } from "./draw.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 1000;
const KEEP = 120; // values of a line
const map = new ExpertMap($("map"));
const series = { speed: [], hits: [], read: [] };
const titles = { speed: "Tokens per second", hits: "Hit rate while decoding", read: "Read from disk" };
const said = { speed: (v) => v.toFixed(1), hits: percent, read: (v) => `${bytes(v)}/s` };
let key = sessionStorage.getItem("key") ?? "";
let before = null; // the last answer, and when it came
let bestRead = 0; // bytes per second
let ttft = null; // seconds, mean of the newest
let timer = null;

function headers() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function bytes(number) {
  let i = 0;
  for (; number >= 1024 && i < 4; i++) number /= 1024;
  return `${number.toFixed(i ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][i]}`;
}

function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const answer = await fetch("stats", { headers: headers() });
    $("door").hidden = answer.status !== 401;
    if (!answer.ok) throw new Error(answer.status === 401 ? "needs an API key" : `error ${answer.status}`);
    show(await answer.json(), performance.now());
    setText($("state"), "live");
  } catch (error) {
    setText($("state"), error instanceof TypeError ? "not reachable" : error.message);
  }
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS);
}

function show(stats, now) {
  setText($("model"), stats.model);
  if (before) compare(stats, before.stats, (now - before.now) / 1000);
  else if (stats.ttft.count) ttft = stats.ttft.seconds / stats.ttft.count;
  before = { stats, now };
  map.show(stats.experts);
  setText($("map-text"), map.text());
  $("device-legend").hidden = !("device" in stats.report.tiers);
  showNumbers(stats);
  showMeters(stats);
  drawLines();
}

function compare(stats, old, seconds) {
  const { decode, bytes_read } = stats.report;
  const lookups = (counters) => counters.hits + counters.late_hits + counters.misses;
  const looked = lookups(decode) - lookups(old.report.decode);
  const read = Math.max(0, (bytes_read - old.report.bytes_read) / seconds);
  bestRead = Math.max(bestRead, read);
  push("hits", looked > 0 ? (decode.hits - old.report.decode.hits) / looked : null);
  push("read", read);
  push("speed", Math.max(0, (stats.engine.generated_tokens - old.engine.generated_tokens) / seconds));
  const started = stats.ttft.count - old.ttft.count;
  if (started > 0) ttft = (stats.ttft.seconds - old.ttft.seconds) / started;
}

function push(name, value) {
  series[name].push(value);
  if (series[name].length > KEEP) series[name].shift();
}

function showNumbers({ engine, report }) {
  const last = (name) => series[name].at(-1) ?? 0;
  const rate = report.decode.hit_rate;
  const numbers = {
    "tokens/s": last("speed").toFixed(1),
    "first token after": ttft === null ? "–" : `${ttft.toFixed(2)} s`,
    "running": `${engine.decoding + engine.prefilling} of ${engine.max_batch}`,
    "waiting": String(engine.waiting),
    "hit rate, decode": rate === null ? "–" : percent(rate),
    "read from disk now": `${bytes(last("read"))}/s`,
    "at best so far": `${bytes(bestRead)}/s`,
    "read in all": bytes(report.bytes_read),
    "waited for experts": `${report.stall_s.toFixed(1)} s`,
    "tokens generated": engine.generated_tokens.toLocaleString("en"),
    "finished": String(engine.finished),
    "failed, refused": String(engine.failed + engine.expired + engine.refused),
  };
  for (const [name, value] of Object.entries(numbers)) {
    const id = `number ${name}`;
    const dd = $(id) ?? newNumber(id, name);
    setText(dd, value);
  }
}

function newNumber(id, name) {
  const box = document.createElement("div");
  const dt = document.createElement("dt");
  const dd = document.createElement("dd");
  dt.textContent = name;
  dd.id = id;
  box.append(dt, dd);
  $("numbers").append(box);
  return dd;
}

function showMeters({ engine, report }) {
  for (const [name, tier] of Object.entries(report.tiers)) {
    if (name !== "disk")
      showMeter(`${name} memory`, tier.experts, tier.capacity,
        `${tier.experts} of ${tier.capacity} slots, ${bytes(tier.capacity_bytes)}`);
  }
  const { prefix_bytes: used, prefix_capacity_bytes: room } = engine;
  showMeter("prefix cache", used, room, room ? `${bytes(used)} of ${bytes(room)}` : "off");
  showMeter("disk", series.read.at(-1) ?? 0, bestRead, `${bytes(series.read.at(-1) ?? 0)}/s`);
}

function showMeter(name, value, max, text) {
  const id = `meter ${name}`;
  let box = $(id);
  if (!box) {
    box = document.createElement("div");
    box.id = id;
    box.className = "meter";
    const meter = document.createElement("meter");
    meter.setAttribute("aria-label", name);
    box.append(name, meter, document.createElement("span"));
    $("meters").append(box);
  }
  const [meter, span] = box.children;
  meter.max = max || 1;
  meter.value = value;
  setText(span, text);
}

function drawLines() {
  for (const [name, values] of Object.entries(series)) {
    const top = name === "hits" ? 1 : Math.max(1, ...values);
    const last = values.at(-1) ?? null;
    setText($(`${name}-title`), `${titles[name]}: ${last === null ? "–" : said[name](last)} (top ${said[name](top)})`);
    drawLine($(name), values, top, KEEP);
  }
}

$("door").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  sessionStorage.setItem("key", key);
  $("door").hidden = true;
  $("words").focus();
  poll();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  before = null; // differences over the time it was hidden would be no rates of now
  poll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  map.repaint();
  drawLines();
});
addEventListener("resize", drawLines);
startChat(headers);
poll();
