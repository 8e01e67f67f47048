"""The talk on the page at / in a real browser: sending and stopping, settings, conversations."""

from __future__ import annotations

import json
from typing import Any

from tests.server.page_driving import (
    ANSWERS,
    MARKS,
    USER,
    answered_by,
    chat_by_keyboard,
    converse,
    expect_idle,
    sync_api,
    wait_for_state,
)
from tests.server.serving import serving

pytestmark = MARKS


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


def test_the_server_goes_on_with_the_words_of_the_answer(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    page.route("**/v1/chat/completions", forced_to_go_on)
    settings = ["moe-infinity settings", json.dumps({"max_tokens": "12", "temperature": "0"})]
    page.evaluate("([name, kept]) => localStorage.setItem(name, kept)", settings)
    chat_by_keyboard(page, "What is a fever?")
    begun = page.locator(ANSWERS).inner_text()
    page.get_by_role("button", name="Continue").click()
    sync_api.expect(page.locator("#talk .note")).to_contain_text("24 tokens", timeout=60_000)
    whole = page.locator(ANSWERS).inner_text()
    assert whole.startswith(begun)
    assert len(whole) > len(begun)


def test_a_limit_reached_while_thinking_says_what_to_do(served, open_page):
    page = open_page(served.url)
    wait_for_state(page, "live")
    answered_by(page, {"reasoning_content": "Well"}, finish="length")
    chat_by_keyboard(page, "go")
    assert "Raise it in Settings" in page.locator("#talk .end").inner_text()
    assert page.get_by_role("button", name="Continue").count() == 0


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
    route.continue_(post_data=json.dumps(body | {"logit_bias": {"0": -100}}))


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
