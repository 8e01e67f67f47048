// The numbers of /stats: the four that matter most, lines over two minutes, and the others folded.

import { countExperts, drawLine } from "./draw.js";
import { bytes, count, percent, setText } from "./text.js";

const $ = (id) => document.getElementById(id);
const SECONDS = 120; // of the lines
const GAP_MS = 5000; // a longer pause between two answers is none that a line may cross
const CHARTS = {
  speed: ["Tokens per second", (v) => v.toFixed(1), 1],
  hits: ["Found in memory", (v) => percent(v), 1],
  read: ["Read from disk", (v) => `${bytes(v)}/s`, 1 << 20],
};

export class Numbers {
  constructor() {
    this.before = null; // the last answer, and when it came
    this.ttft = null; // seconds, mean of the newest
    this.lines = { speed: [], hits: [], read: [] }; // [time in ms, value]
    $("charts").append(...Object.keys(CHARTS).map(newChart));
  }

  show(stats, now) {
    const { before } = this;
    if (before && now - before.now < GAP_MS) this.compare(stats, before.stats, now, (now - before.now) / 1000);
    else for (const name of Object.keys(this.lines)) this.push(name, now, null);
    if (stats.ttft.count > (before?.stats.ttft.count ?? 0)) {
      const old = before?.stats.ttft ?? { count: 0, seconds: 0 };
      this.ttft = (stats.ttft.seconds - old.seconds) / (stats.ttft.count - old.count);
    }
    this.before = { stats, now };
    this.showFirst(stats);
    this.showRest(stats);
    this.draw();
  }

  compare(stats, old, now, seconds) {
    const { decode, bytes_read } = stats.report;
    const lookups = (counters) => counters.hits + counters.late_hits + counters.misses;
    const looked = lookups(decode) - lookups(old.report.decode);
    this.push("hits", now, looked > 0 ? (decode.hits - old.report.decode.hits) / looked : null);
    this.push("read", now, Math.max(0, (bytes_read - old.report.bytes_read) / seconds));
    this.push("speed", now, Math.max(0, (stats.engine.generated_tokens - old.engine.generated_tokens) / seconds));
  }

  push(name, now, value) {
    const kept = this.lines[name].filter(([time]) => now - time <= SECONDS * 1000);
    this.lines[name] = [...kept, [now, value]];
  }

  last(name) {
    return this.lines[name].at(-1)?.[1] ?? null;
  }

  showFirst({ engine, experts, refusals }) {
    const { device, host, disk } = countExperts(experts);
    const held = device + host;
    const all = held + disk;
    const running = engine.decoding + engine.prefilling;
    const refused = refusals ? `, ${count(refusals)} refused` : "";
    const first = (name, title, value, below) => showNumber("numbers", name, title, value, below);
    first("Speed", "What all requests together got during the last second",
      (this.last("speed") ?? 0).toFixed(1), "tokens/s");
    first("First token", "From a request's arrival to its first token: the newest requests",
      this.ttft === null ? "–" : `${this.ttft.toFixed(2)} s`, "after arrival");
    first("Requests", `At most ${engine.max_batch} run together, the others wait. Refused: since the start`,
      `${running} running`, `${engine.waiting} waiting${refused}`);
    first("In memory", "The others are read from disk when the model needs them",
      percent(held / (all || 1)), `${count(held)}/${count(all)} experts`);
  }

  showRest({ engine, report, refusals }) {
    const { decode, stall_s, bytes_read } = report;
    const rest = (name, title, value) => showNumber("rest", name, title, value);
    rest("Experts found in memory", "Hit rate: of the experts that answers needed since the start",
      decode.hit_rate === null ? "–" : percent(decode.hit_rate));
    rest("Waited for the disk", "Computing stood still because an expert was not there yet", `${stall_s.toFixed(1)} s`);
    rest("Read from disk", "Bytes of experts since the start", bytes(bytes_read));
    rest("Prompt tokens", "Read in prompts since the start", count(engine.prompt_tokens));
    rest("Known before", "Prompt tokens that the prefix cache had, so they were not computed again",
      count(engine.cached_tokens));
    rest("Tokens generated", "In answers since the start", count(engine.generated_tokens));
    rest("Answers finished", "Since the start", count(engine.finished));
    rest("Refused or failed", "Requests since the start; the server's log says why", count(refusals));
    for (const [name, tier] of Object.entries(report.tiers))
      if (name !== "disk")
        showMeter(`${name} memory`, tier.experts, tier.capacity,
          `${tier.experts} of ${tier.capacity} experts, ${bytes(tier.capacity_bytes)}`);
    const { prefix_bytes: used, prefix_capacity_bytes: room } = engine;
    showMeter("prefix cache", used, room, room ? `${bytes(used)} of ${bytes(room)}` : "off");
  }

  // Draw the lines.
  draw() {
    const now = this.before?.now ?? 0;
    for (const [name, [, said, least]] of Object.entries(CHARTS)) {
      const points = this.lines[name];
      const top = name === "hits" ? 1 : rounded(Math.max(least, ...points.map(([, value]) => value)), least);
      const value = this.last(name);
      setText($(`${name}-value`), value === null ? "–" : said(value));
      setText($(`${name}-top`), said(top));
      drawLine($(name), points, { top, now, seconds: SECONDS });
    }
  }
}

// The next of 1, 2, 5, 10, ... times `unit`, so that a line's top changes seldom.
function rounded(value, unit) {
  let step = unit;
  for (let i = 0; step < value; i++) step *= i % 3 === 1 ? 2.5 : 2;
  return step;
}

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function showNumber(list, name, title, value, below = "") {
  const id = `${list} ${name}`;
  if (!$(id)) $(list).append(make("div", {}, make("dt", {}, name), make("dd", { id }), make("dd", { class: "below" })));
  const box = $(id).parentElement;
  box.title = title;
  setText($(id), value);
  setText(box.lastElementChild, below);
}

function showMeter(name, value, max, text) {
  const id = `meter ${name}`;
  if (!$(id)) {
    const meter = make("meter", { "aria-label": name });
    $("meters").append(make("div", { id, class: "meter" }, name, meter, make("span", {})));
  }
  const [meter, span] = $(id).children;
  meter.max = max || 1;
  meter.value = value;
  setText(span, text);
}

function newChart(name) {
  const title = make("h3", { id: `${name}-title` }, CHARTS[name][0]);
  const canvas = make("canvas", { id: name, role: "img", "aria-labelledby": `${name}-title ${name}-value` });
  return make("div", { class: "chart" },
    title, make("b", { id: `${name}-value` }), make("span", { id: `${name}-top`, class: "top", title: "The top of the picture" }),
    canvas, make("div", { class: "axis" }, make("span", {}, "2 min ago"), make("span", {}, "now")));
}
