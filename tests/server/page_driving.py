"""Drives the page in a real browser. A module that imports this is skipped without one."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
MARKS = [
    pytest.mark.browser,
    pytest.mark.timeout(180),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}}
KEY = "open"
ANSWERS = "#talk .assistant .content"
HOSTILE = """# A title
**bold** _under_ `code` ~~gone~~ <img src=x onerror="window.isHacked = true">
[good](https://example.org/a) [bad](javascript:window.isHacked=true) [data](data:text/html,x)
https://example.com/b and <script>window.isHacked = true</script>

1. one
2. two
   - inner

| a | b |
|---|---|
| 1 | <b>2</b> |

> quoted

```html
<script>window.isHacked = true</script>
```
"""

USER = {"role": "user", "content": "What is a fever?"}

# The colour in the middle of every cell, row by row.
CELLS = """() => {
  const map = document.getElementById("map"), brush = map.getContext("2d"), rows = [];
  for (let y = 4; y < map.height; y += 8) { const row = [];
    for (let x = 4; x < map.width; x += 8) row.push(brush.getImageData(x, y, 1, 1).data.join());
    rows.push(row); }
  return rows; }"""
# Text of each kind on what lies behind it: [what, colour, background].
TEXTS = """() => [...document.querySelectorAll(
    "h1, h2, h3, #state, dt, dd, #map-text, li, .meter, .chart b, .chart span, #talk b, #talk div,"
    + "#talk span, textarea, summary, button"
  )].filter((one) => one.textContent.trim() || one.placeholder).map((one) => {
    let behind = one, paint;
    while ((paint = getComputedStyle(behind).backgroundColor) === "rgba(0, 0, 0, 0)")
      behind = behind.parentElement;
    return [one.id || one.className || one.tagName, getComputedStyle(one).color, paint]; })"""
# A variable of the style sheet as rgb(...).
RGB_OF = """(name) => { const one = document.createElement("i");
  one.style.color = `var(--${name})`; document.body.append(one);
  const found = getComputedStyle(one).color; one.remove(); return found; }"""
NUMBERS = """() => Object.fromEntries([...document.querySelectorAll("dl div")].map(
  (box) => [box.children[0].textContent, box.children[1].textContent]))"""


def wait_for_state(page: Any, text: str) -> None:
    sync_api.expect(page.locator("#state")).to_have_text(text, timeout=30_000)


def wait_until(page: Any, condition: Callable[[], bool]) -> None:
    """Asked from here: the page's own policy forbids what playwright would evaluate in it."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        page.wait_for_timeout(50)


def expect_idle(page: Any) -> None:
    """Wait for the end of the answer."""
    button = page.get_by_role("button", name="Send", exact=True)
    sync_api.expect(button).to_be_visible(timeout=60_000)


def chat_by_keyboard(page: Any, words: str) -> None:
    """From wherever the focus is, with Tab and Enter alone, to the end of the answer."""
    for _ in range(20):
        if page.evaluate("document.activeElement.id") == "words":
            break
        page.keyboard.press("Tab")
    page.keyboard.type(words)
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#talk article.assistant")).not_to_have_count(0)
    expect_idle(page)
    sync_api.expect(page.locator("#talk article.assistant .note").last).to_be_visible()


def converse(page: Any, messages: list[dict[str, Any]]) -> None:
    """Reload the page with this conversation kept, and the newest."""
    made = {"id": "made", "changed": 9e15, "messages": messages}
    kept = ["moe-infinity conversation made", json.dumps(made)]
    page.evaluate("([name, kept]) => localStorage.setItem(name, kept)", kept)
    page.reload()
    wait_for_state(page, "live")


def answered_by(page: Any, *deltas: dict[str, Any], finish: str = "stop") -> list[dict[str, Any]]:
    """The next answers are a stream of these. Returns the bodies of requests as they come."""
    chunks: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    lines = [json.dumps(each) for each in (*chunks, {"choices": [], "usage": usage})]
    body = "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]"))
    bodies = []

    def fulfill(route: Any) -> None:
        bodies.append(json.loads(route.request.post_data))
        route.fulfill(content_type="text/event-stream", body=body)

    page.unroute("**/v1/chat/completions")
    page.route("**/v1/chat/completions", fulfill)
    return bodies


def contrast(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    """WCAG 2's, from 1 to 21."""

    def luminance(rgb: tuple[int, ...]) -> float:
        parts = [value / 255 for value in rgb]
        red, green, blue = [
            x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts
        ]
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def rgb(css: str) -> tuple[int, ...]:
    return tuple(int(value) for value in re.findall(r"[\d.]+", css)[:3])
