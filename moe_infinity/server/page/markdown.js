// Markdown as elements. Text enters the document only as text nodes, so no answer of a model can
// bring HTML, and links go to http and https only.

import { codeBlock } from "./code.js";

const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)]) +(.*)$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*?) *#* *$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DASHES = /^[ |:-]*-[ |:-]*$/;
const INLINE = new RegExp([
  "(?<tick>`+)(?<code>[^`]+)\\k<tick>",
  "\\*\\*(?<strong>[^*\\s](?:[^*]*[^*\\s])?)\\*\\*",
  "(?<![\\w*])\\*(?<em>[^*\\s](?:[^*]*[^*\\s])?)\\*",
  "(?<!\\w)_(?<under>[^_\\s](?:[^_]*[^_\\s])?)_(?!\\w)",
  "~~(?<del>[^~]+)~~",
  "\\[(?<words>[^\\[\\]\\n]{1,500})\\]\\((?<target>[^()\\s]{1,2000})\\)",
  "(?<bare>https?://[^\\s<>\"'`)\\]]{1,2000})",
].join("|"), "g");
const MAX_DEPTH = 8;

export function markdown(text) {
  const fragment = document.createDocumentFragment();
  blocks(text.split("\n"), fragment, 0);
  return fragment;
}

function make(tag, parent, text = "") {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  parent.append(element);
  return element;
}

function blocks(lines, parent, depth) {
  if (depth > MAX_DEPTH) {
    make("p", parent, lines.join("\n"));
    return;
  }
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) i++;
    else i = block(lines, i, parent, depth);
  }
}

// Add the block that begins at line i. Returns the line behind it.
function block(lines, i, parent, depth) {
  const line = lines[i];
  let found;
  if ((found = FENCE.exec(line))) return fenced(lines, i, found, parent);
  if ((found = HEADING.exec(line))) {
    inline(found[2], make("h3", parent));
    return i + 1;
  }
  if (RULE.test(line)) {
    make("hr", parent);
    return i + 1;
  }
  if (QUOTE.test(line)) {
    const inner = [];
    for (; i < lines.length && (found = QUOTE.exec(lines[i])); i++) inner.push(found[1]);
    blocks(inner, make("blockquote", parent), depth + 1);
    return i;
  }
  if (ITEM.test(line)) return list(lines, i, parent, depth);
  if (isTable(lines, i)) return table(lines, i, parent);
  const words = [];
  do words.push(lines[i++]); while (i < lines.length && lines[i].trim() && !begins(lines, i));
  inline(words.join("\n"), make("p", parent));
  return i;
}

function begins(lines, i) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((kind) => kind.test(lines[i])) || isTable(lines, i);
}

function fenced(lines, i, [, fence, info], parent) {
  const inner = [];
  const isEnd = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  for (i++; i < lines.length && !isEnd(lines[i]); i++) inner.push(lines[i]);
  parent.append(codeBlock(inner.join("\n"), info.trim().split(/\s/)[0].toLowerCase()));
  return i + 1;
}

function list(lines, i, parent, depth) {
  const [, indent, marker] = ITEM.exec(lines[i]);
  const isOrdered = /\d/.test(marker);
  const element = make(isOrdered ? "ol" : "ul", parent);
  if (isOrdered) element.start = parseInt(marker, 10);
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== isOrdered) break;
    const inner = [item[3]];
    for (i++; i < lines.length && lines[i].startsWith(indent + "  ") && lines[i].trim(); i++)
      inner.push(lines[i].slice(indent.length + 2));
    const li = make("li", element);
    inline(inner[0], li);
    blocks(inner.slice(1), li, depth + 1);
    if (i + 1 < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1])) i++;
  }
  return i;
}

function isTable(lines, i) {
  return lines[i].includes("|") && i + 1 < lines.length && lines[i + 1].includes("|")
    && DASHES.test(lines[i + 1]);
}

function table(lines, i, parent) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const box = make("div", parent);
  box.className = "table";
  box.tabIndex = 0;
  const element = make("table", box);
  const head = make("tr", make("thead", element));
  for (const cell of cells(lines[i])) inline(cell, make("th", head));
  const body = make("tbody", element);
  for (i += 2; i < lines.length && lines[i].includes("|"); i++) {
    const row = make("tr", body);
    for (const cell of cells(lines[i])) inline(cell, make("td", row));
  }
  return i;
}

function inline(text, parent, depth = 0) {
  let end = 0;
  if (depth <= MAX_DEPTH) {
    for (const found of text.matchAll(INLINE)) {
      parent.append(text.slice(end, found.index));
      end = found.index + found[0].length;
      span(found, parent, depth + 1);
    }
  }
  parent.append(text.slice(end));
}

function span(found, parent, depth) {
  const { code, strong, em, under, del, words, target, bare } = found.groups;
  if (code !== undefined) make("code", parent, code);
  else if (strong !== undefined) inline(strong, make("strong", parent), depth);
  else if (em !== undefined || under !== undefined) inline(em ?? under, make("em", parent), depth);
  else if (del !== undefined) inline(del, make("del", parent), depth);
  else if (isWeb(target ?? bare)) link(target ?? bare, words ?? bare, parent);
  else parent.append(found[0]);
}

function isWeb(target) {
  return /^https?:\/\//i.test(target) && URL.canParse(target);
}

function link(target, words, parent) {
  const a = make("a", parent, words);
  a.href = target;
  a.rel = "noopener noreferrer";
  a.target = "_blank";
}
