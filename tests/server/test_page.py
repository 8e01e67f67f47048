"""The page at / in a real browser: what it shows, whom it leaves out, what it complains of."""

from __future__ import annotations

from itertools import combinations

from tests.server.page_driving import (
    ANSWERS,
    CELLS,
    HOSTILE,
    KEY,
    MARKS,
    NUMBERS,
    PHONE,
    RGB_OF,
    TEXTS,
    USER,
    answered_by,
    chat_by_keyboard,
    contrast,
    converse,
    rgb,
    wait_for_state,
    wait_until,
)
from tests.server.serving import serving

pytestmark = MARKS


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
