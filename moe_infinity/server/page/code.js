// Blocks of code: colored by highlight.js, which is loaded with the first of them, and copied with
// a button.

const MAX_COLORED = 50_000; // characters
let library = null; // or the promise of it

export function codeBlock(text, language) {
  const box = document.createElement("div");
  box.className = "code";
  const head = document.createElement("div");
  head.append(language || "code", copyButton(() => text));
  const pre = document.createElement("pre");
  pre.tabIndex = 0; // or the keyboard could not scroll it
  const code = document.createElement("code");
  code.textContent = text;
  pre.append(code);
  box.append(head, pre);
  if (language && text.length <= MAX_COLORED) colorWhenLoaded(code, text, language);
  return box;
}

function colorWhenLoaded(code, text, language) {
  if (library && !(library instanceof Promise)) {
    color(code, text, language);
    return;
  }
  library ??= import("./highlight.min.js").then((module) => (library = module.default));
  library.then(() => color(code, text, language), () => {}); // without colors it can be read, too
}

function color(code, text, language) {
  if (!library.getLanguage(language)) return;
  const { value } = library.highlight(text, { language, ignoreIllegals: true });
  const marked = new DOMParser().parseFromString(`<pre>${value}</pre>`, "text/html");
  code.replaceChildren(...spans(marked.querySelector("pre")));
}

// Only text and the classes of spans are taken, whatever the library made of it.
function spans(parent) {
  return [...parent.childNodes].map((node) => {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    const span = document.createElement("span");
    span.className = node.className;
    span.append(...spans(node));
    return span;
  });
}

// A button that copies what `textOf` returns.
export function copyButton(textOf) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    button.textContent = (await copy(textOf())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // no permission, or http from another machine
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}
