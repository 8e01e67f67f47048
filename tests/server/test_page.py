"""The page at / in a real browser: what it shows, whom it leaves out, what it complains of."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import pytest

from moe_infinity import MoE
from tests.server.conftest import DEMO
from tests.server.serving import Serving, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with MoE(DEMO, host_memory="50%", dtype="float32") as moe, serving(moe) as served:
        yield served


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Pages that must not complain on their console, but of an answer the test expects."""
    contexts = []
    complaints = []

    def open_page(url: str, *, may_say: str = "nothing", **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()

        def note(message: Any) -> None:
            if message.type in ("error", "warning") and may_say not in message.text:
                complaints.append(message.text)

        page.on("console", note)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


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


def test_the_heat_map_and_the_numbers_follow_a_request(served, open_page):
    reading = "willReadFrequently"  # that is our reading of the map
    page = open_page(served.url, may_say=reading, reduced_motion="reduce")
    wait_for_state(page, "live")
    states = served.moe.expert_states()
    before = page.evaluate(CELLS)
    numbers = page.evaluate(NUMBERS)
    assert (len(before), len(before[0])) == tuple(states.shape)
    body = {"prompt": "Once upon a time", "max_tokens": 150, "logit_bias": {"0": -100}}
    page.evaluate(
        "(body) => { window.asked = fetch('v1/completions', { method: 'POST',"
        "body: JSON.stringify(body) }).then(() => { window.isAnswered = true; }); }",
        body,
    )
    wait_until(page, lambda: page.evaluate(CELLS) != before)
    wait_until(page, lambda: page.evaluate("window.isAnswered"))
    generated = int(numbers["Tokens generated"].replace(",", "")) + 150
    wait_until(page, lambda: page.evaluate(NUMBERS)["Tokens generated"] == f"{generated:,}")
    after = page.evaluate(NUMBERS)
    assert int(after["Answers finished"]) == int(numbers["Answers finished"]) + 1
    assert after["Experts found in memory"].endswith("%")
    # Once it is idle, nothing is marked as in use or just loaded.
    wait_until(page, lambda: len({cell for row in page.evaluate(CELLS) for cell in row}) == 2)


def test_refused_requests_are_counted(served, open_page):
    page = open_page(served.url, may_say="400 (Bad Request)")
    wait_for_state(page, "live")
    before = int(page.evaluate(NUMBERS)["Refused or failed"])
    page.evaluate("fetch('v1/completions', { method: 'POST', body: '{}' })")
    wait_until(page, lambda: int(page.evaluate(NUMBERS)["Refused or failed"]) == before + 1)


def test_the_chat_answers_to_the_keyboard_alone(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    for turn in (1, 2):
        chat_by_keyboard(page, "What is a fever?")
        answers = page.locator(ANSWERS).all_inner_texts()
        assert len(answers) == turn
        assert all(answers)
        assert page.evaluate("document.activeElement.id") == "words"
    assert page.locator("#talk .error").count() == 0


def test_a_phone_shows_it_all_without_scrolling_sideways(served, open_page):
    page = open_page(served.url, **PHONE)
    wait_for_state(page, "live")
    chat_by_keyboard(page, "a" * 200)
    answer = {"role": "assistant", "content": HOSTILE + "| wide " * 60, "end": "cut", "note": "n"}
    converse(page, [USER, {"role": "user", "content": "w" * 3000}, answer])
    page.locator("#more summary").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    too_wide = "(one) => !one.closest('pre') && one.getBoundingClientRect().right > 360"
    ids = f"[...document.querySelectorAll('main *')].filter({too_wide}).map((one) => one.id)"
    assert page.evaluate(ids) == []


def test_light_and_dark_differ_and_both_can_be_read(served, open_page):
    backgrounds = set()
    for scheme in ("light", "dark"):
        page = open_page(served.url, color_scheme=scheme)
        wait_for_state(page, "live")
        converse(page, [USER, {"role": "assistant", "content": "so", "error": "e", "note": "n"}])
        for what, text, behind in page.evaluate(TEXTS):
            assert contrast(rgb(text), rgb(behind)) >= 4.5, (scheme, what, text, behind)
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        names = ("disk", "host", "used")  # cells may be small
        colors = [rgb(page.evaluate(RGB_OF, name)) for name in names]
        for one, other in combinations(colors, 2):
            assert contrast(one, other) >= 3, (scheme, names, colors)
    assert len(backgrounds) == 2


def test_the_page_asks_for_the_key_and_goes_on_with_it(served, open_page):
    with serving(served.moe, api_key=[KEY]) as locked:
        page = open_page(locked.url, may_say="401 (Unauthorized)")
        wait_for_state(page, "needs an API key")
        page.keyboard.press("Tab")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.wait_for_timeout(2000)
        wait_for_state(page, "needs an API key")
        page.locator("#key").fill(KEY)
        page.keyboard.press("Enter")
        wait_for_state(page, "live")
        assert page.locator("#door").is_hidden()
        assert page.evaluate("document.activeElement.id") == "words"
        chat_by_keyboard(page, "What is a fever?")
        assert page.locator("#talk .error").count() == 0
        assert page.locator(ANSWERS).inner_text()
        page.goto("about:blank")  # or it would complain that the server has gone


def test_hostile_markdown_is_shown_and_does_nothing(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    answered_by(page, *({"content": part} for part in HOSTILE.splitlines(keepends=True)))
    chat_by_keyboard(page, "go")
    answer = page.locator(ANSWERS)
    links = answer.locator("a")
    targets = [link.get_attribute("href") for link in links.all()]
    assert targets == ["https://example.org/a", "https://example.com/b"]
    assert all("noopener" in (link.get_attribute("rel") or "") for link in links.all())
    assert answer.locator("img, script, b").count() == 0
    counts = {tag: answer.locator(tag).count() for tag in ("h3", "strong", "em", "del", "table")}
    assert counts == {"h3": 1, "strong": 1, "em": 1, "del": 1, "table": 1}
    assert answer.locator("ol > li").count() == 2
    assert answer.locator("ol ul > li").inner_text() == "inner"
    assert answer.locator("td").all_inner_texts() == ["1", "<b>2</b>"]
    assert "<script>" in answer.locator("pre").inner_text()
    assert "<img" in answer.inner_text()
    assert page.evaluate("window.isHacked") is None


def test_reasoning_and_calls_of_tools_are_shown(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    call = {"index": 0, "id": "1", "function": {"name": "weather", "arguments": '{"city":'}}
    more = {"index": 0, "function": {"arguments": '"Rome"}'}}
    answered_by(
        page,
        {"reasoning_content": "Let me "},
        {"reasoning_content": "*think*."},
        {"content": "Done"},
        {"tool_calls": [call]},
        {"tool_calls": [more]},
    )
    chat_by_keyboard(page, "go")
    reasoning, called = page.locator("#talk details").all()
    assert reasoning.get_attribute("open") is None
    reasoning.locator("summary").press("Enter")
    assert reasoning.locator("em").inner_text() == "think"
    assert "weather" in called.locator("summary").inner_text()
    assert called.locator("pre").inner_text() == '{"city":"Rome"}'
    assert page.locator(ANSWERS).inner_text() == "Done"


def test_one_button_sends_and_stops_and_the_rest_can_be_had_again(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    held: list[Any] = []
    page.route("**/v1/chat/completions", lambda route: held.append(route))  # never answered
    page.locator("#words").fill("What is a fever?")
    page.locator("#send").click()
    stop = page.get_by_role("button", name="Stop", exact=True)
    stop.click()
    sync_api.expect(page.locator("#talk .end")).to_have_text("Stopped.")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Retry").click()
    sync_api.expect(page.locator("#talk .note")).to_contain_text("tokens", timeout=60_000)
    assert page.locator("#talk article").count() == 2
    words = page.locator(ANSWERS).inner_text()
    assert words
    page.reload()
    wait_for_state(page, "live")
    assert page.locator(ANSWERS).inner_text() == words


def test_the_progress_of_a_prompt_is_shown(served, open_page):
    """Until the first token. The stream is held back in the page."""
    page = open_page(served.url)
    wait_for_state(page, "live")
    page.evaluate("""() => { const real = window.fetch;
      window.fetch = (path, options) => path !== "v1/chat/completions" ? real(path, options)
        : Promise.resolve(new Response(new ReadableStream({ start(to) {
          window.send = (one) => to.enqueue(new TextEncoder().encode(
            `data: ${JSON.stringify(one)}\\n\\n`)); } }))); }""")
    page.locator("#words").fill("a long text")
    page.keyboard.press("Enter")
    waiting = page.locator("#talk .waiting")
    sync_api.expect(waiting).to_contain_text("Waiting")
    delta = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    progress = {"total": 13508, "cache": 0, "processed": 4096, "time_ms": 4096}
    page.evaluate("(one) => window.send(one)", delta | {"prompt_progress": progress})
    sync_api.expect(waiting).to_contain_text("4,096 of 13,508 tokens, about 10 s left")
    assert page.locator("#talk progress").evaluate("(one) => one.value / one.max") == 4096 / 13508
    page.evaluate("(one) => window.send(one)", {"choices": [{"delta": {"content": "Done"}}]})
    sync_api.expect(page.locator(ANSWERS)).to_have_text("Done")
    assert waiting.count() == 0


def test_a_cut_answer_says_so_and_goes_on(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    answered_by(page, {"content": "One, two,"}, finish="length")
    chat_by_keyboard(page, "Count")
    assert "limit" in page.locator("#talk .end").inner_text()
    bodies = answered_by(page, {"content": " three"})
    page.get_by_role("button", name="Continue").click()
    sync_api.expect(page.locator(ANSWERS)).to_have_text("One, two, three")
    sync_api.expect(page.locator("#talk .end")).to_have_count(0)
    (body,) = bodies
    assert body["messages"][-1] == {"role": "assistant", "content": "One, two,"}
    assert body["continue_final_message"] is True
    assert page.locator("#talk .note").inner_text().startswith("4 tokens")


def test_an_answer_that_filled_the_context_cannot_go_on(served, open_page):
    with serving(served.moe, max_context=24, max_new_tokens=64) as small:
        page = open_page(small.url)
        wait_for_state(page, "live")
        page.route("**/v1/chat/completions", forced_to_go_on)
        chat_by_keyboard(page, "What is a fever?")
        assert "context is full" in page.locator("#talk .end").inner_text()
        assert page.get_by_role("button", name="Continue").count() == 0
        page.goto("about:blank")


def forced_to_go_on(route: Any) -> None:
    body = json.loads(route.request.post_data)
    route.continue_(post_data=json.dumps(body | {"logit_bias": {"0": -100}, "max_tokens": None}))


def test_settings_are_kept_and_sent(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    bodies = answered_by(page, {"content": "so"})
    chat_by_keyboard(page, "go")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be short.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Most tokens").fill("7")
    page.get_by_label("Thinking").select_option("Off")
    page.get_by_role("button", name="Done").click()
    page.reload()
    wait_for_state(page, "live")
    assert page.locator("#open-settings").inner_text() == "Settings (4)"
    chat_by_keyboard(page, "go")
    names = ("temperature", "max_tokens", "reasoning_effort")
    assert not set(names) & bodies[0].keys()
    assert [bodies[1][name] for name in names] == [0.5, 7, "none"]
    assert bodies[1]["messages"][0] == {"role": "system", "content": "Be short."}


def test_conversations_are_listed_and_a_deleted_one_comes_back(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    answered_by(page, {"content": "so"})
    for words in ("First **question**", "Second question"):
        page.get_by_role("button", name="New", exact=True).click()
        chat_by_keyboard(page, words)
    page.reload()
    wait_for_state(page, "live")
    assert page.locator("#chat-title").inner_text() == "Second question"
    page.get_by_role("button", name="Chats").click()
    names = page.locator("#list li button:first-child")
    assert names.all_inner_texts() == ["Second question", "First question"]
    names.last.click()
    assert page.locator("#chat-title").inner_text() == "First question"
    page.get_by_role("button", name="Chats").click()
    page.get_by_role("button", name="Delete: First question").click()
    assert names.all_inner_texts() == ["Second question"]
    page.get_by_role("button", name="Undo").click()
    assert names.all_inner_texts() == ["Second question", "First question"]
    assert page.locator("#talk .user .content").inner_text() == "First question"


def test_an_edited_message_is_asked_anew_and_the_rest_comes_back(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    bodies = answered_by(page, {"content": "so"})
    for words in ("one", "two"):
        chat_by_keyboard(page, words)
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("The message").fill("changed")
    page.locator("#talk form").get_by_role("button", name="Send").click()
    sync_api.expect(page.locator("#talk article")).to_have_count(2)
    expect_idle(page)
    assert bodies[-1]["messages"] == [{"role": "user", "content": "changed"}]
    page.get_by_role("button", name="Undo").click()
    assert page.locator("#talk .user .content").all_inner_texts() == ["one", "two"]


def test_answers_and_code_are_copied_and_code_is_colored(served, open_page):
    page = open_page(served.url, permissions=["clipboard-read", "clipboard-write"])
    wait_for_state(page, "live")
    code = 'def greet():\n    return "<b>&amp;</b>"  # so'
    content = f"Look:\n```python\n{code}\n```"
    converse(page, [USER, {"role": "assistant", "content": content}])
    sync_api.expect(page.locator(".hljs-keyword").first).to_have_text("def")
    assert page.locator("#talk pre").inner_text() == code
    for button, copied in (
        (".code button", code),
        (".assistant .foot button:last-of-type", content),
    ):
        page.locator(button).click()
        sync_api.expect(page.locator(button)).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == copied


def test_a_question_is_markdown_and_a_long_one_is_folded(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    long = "A **crow**\nsat. " + "word " * 2500
    converse(page, [{"role": "user", "content": long}, {"role": "assistant", "content": "so"}])
    question = page.locator("#talk .user .content")
    assert question.locator("strong").inner_text() == "crow"
    assert question.bounding_box()["height"] < 200
    page.get_by_role("button", name="Show all 2,503 words").click()
    assert question.bounding_box()["height"] > 400


def test_the_start_says_what_one_looks_at(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    start = page.locator("#talk .start")
    layers, experts = served.moe.expert_states().shape
    sync_api.expect(start).to_contain_text(f"{layers * experts} experts in {layers} layers")
    sync_api.expect(start).to_contain_text("1,024 tokens")
    answered_by(page, {"content": "so"})
    start.get_by_role("button").first.click()
    sync_api.expect(page.locator(ANSWERS)).to_have_text("so")


def test_an_error_of_the_server_is_shown_by_its_message(served, open_page):
    page = open_page(served.url, may_say="400 (Bad Request)")
    wait_for_state(page, "live")
    page.locator("#words").fill("word " * 5000)
    page.locator("#send").click()
    sync_api.expect(page.locator("#talk .error")).to_contain_text("tokens")


def test_everything_to_use_has_a_name(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    nameless = """() => [...document.querySelectorAll(
      "button, input, select, textarea, canvas, meter")]
      .filter((one) => !(one.getAttribute("aria-label") || one.labels?.length
        || (one.getAttribute("aria-labelledby") ?? "").split(" ").some(
          (id) => document.getElementById(id)?.textContent.trim())
        || (one.tagName === "BUTTON" && one.textContent.trim()))).map((one) => one.outerHTML)"""
    assert page.evaluate(nameless) == []
    layers, experts = served.moe.expert_states().shape
    described = page.locator("#map-text").inner_text()
    assert f"{layers} layers (down) of {experts} experts (across)" in described
