"""The page at / in a real browser: what it shows, whom it leaves out, what it complains of."""

from __future__ import annotations

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
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(180),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]
PHONE: dict[str, Any] = {"viewport": {"width": 360, "height": 740}}
KEY = "open"

# The colour in the middle of every cell, row by row.
CELLS = """() => {
  const map = document.getElementById("map"), brush = map.getContext("2d"), rows = [];
  for (let y = 4; y < map.height; y += 8) { const row = [];
    for (let x = 4; x < map.width; x += 8) row.push(brush.getImageData(x, y, 1, 1).data.join());
    rows.push(row); }
  return rows; }"""
# Text of each kind on what lies behind it: [what, colour, background].
TEXTS = """() => [...document.querySelectorAll(
    "h1, h2, h3, #state, dt, dd, #map-text, li, .tier, #talk b, #talk span, textarea, button"
  )].filter((one) => one.textContent.trim() || one.placeholder).map((one) => {
    let behind = one, paint;
    while ((paint = getComputedStyle(behind).backgroundColor) === "rgba(0, 0, 0, 0)")
      behind = behind.parentElement;
    return [one.id || one.className || one.tagName, getComputedStyle(one).color, paint]; })"""
# A variable of the style sheet as rgb(...).
RGB_OF = """(name) => { const one = document.createElement("i");
  one.style.color = `var(--${name})`; document.body.append(one);
  const found = getComputedStyle(one).color; one.remove(); return found; }"""
NUMBERS = """() => Object.fromEntries([...document.querySelectorAll("#numbers div")].map(
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


def chat_by_keyboard(page: Any, words: str) -> None:
    """From wherever the focus is, with Tab and Enter alone, to the end of the answer."""
    for _ in range(10):
        if page.evaluate("document.activeElement.id") == "words":
            break
        page.keyboard.press("Tab")
    page.keyboard.type(words)
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#stop")).to_be_enabled()
    sync_api.expect(page.locator("#stop")).to_be_disabled(timeout=60_000)


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
    page = open_page(served.url, may_say="willReadFrequently")  # that is our reading of the map
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
    generated = int(numbers["tokens generated"].replace(",", "")) + 150
    wait_until(page, lambda: page.evaluate(NUMBERS)["tokens generated"] == f"{generated:,}")
    after = page.evaluate(NUMBERS)
    assert int(after["finished"]) == int(numbers["finished"]) + 1
    assert after["hit rate, decode"].endswith("%")
    assert len({cell for row in page.evaluate(CELLS) for cell in row}) >= 2


def test_the_chat_answers_to_the_keyboard_alone(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    for turn in (1, 2):
        chat_by_keyboard(page, "What is a fever?")
        answers = page.locator("#talk p:nth-child(even) span").all_inner_texts()
        assert len(answers) == turn
        assert all(answers)
        assert page.evaluate("document.activeElement.id") == "words"
    assert page.locator("#talk .error").count() == 0


def test_a_phone_shows_it_all_without_scrolling_sideways(served, open_page):
    page = open_page(served.url, **PHONE)
    wait_for_state(page, "live")
    chat_by_keyboard(page, "a" * 200)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    too_wide = "(one) => one.getBoundingClientRect().right > 360"
    ids = f"[...document.querySelectorAll('main *')].filter({too_wide}).map((one) => one.id)"
    assert page.evaluate(ids) == []


def test_light_and_dark_differ_and_both_can_be_read(served, open_page):
    backgrounds = set()
    for scheme in ("light", "dark"):
        page = open_page(served.url, color_scheme=scheme)
        wait_for_state(page, "live")
        page.evaluate("say('Model', 'words').className = 'error'; say('You', 'words')")
        for what, text, behind in page.evaluate(TEXTS):
            assert contrast(rgb(text), rgb(behind)) >= 4.5, (scheme, what, text, behind)
        backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        names = ("absent", "resident", "active")
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
        assert page.locator("#talk p:nth-child(even) span").inner_text()
        page.goto("about:blank")  # or it would complain that the server has gone
