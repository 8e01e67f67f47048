"""Make the pictures of the server's page in docs/images, in real Chromium, with the demo model.

pip install -e '.[browser]' -c constraints.txt
CHROMIUM=/usr/bin/chromium python scripts/page_screenshots.py
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
PICTURES: dict[str, dict[str, Any]] = {
    "page-desktop-light": {
        "viewport": {"width": 1280, "height": 900},
        "color_scheme": "light",
    },
    "page-phone-dark": {
        "viewport": {"width": 390, "height": 844},
        "color_scheme": "dark",
    },
}
QUESTIONS = ("Who lives in the forest?", "What is a fever?")


def main() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moe_infinity", "serve", "models/demo"]
    options = ["--host-memory", "50%", "--port", str(port), "--max-new-tokens", "120"]
    server = subprocess.Popen([*command, *options], cwd=ROOT)
    try:
        wait_for(url)
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            for name, options_of_page in PICTURES.items():
                take(browser.new_page(reduced_motion="reduce", **options_of_page), url, name)
            browser.close()
    finally:
        server.terminate()
        server.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(url: str) -> None:
    for _ in range(600):
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server did not start")


def take(page: Any, url: str, name: str) -> None:
    """Of the page while it answers the last question."""
    page.route("**/v1/chat/completions", seeded)
    page.goto(url)
    for number, question in enumerate(QUESTIONS, start=1):
        page.locator("#words").fill(question)
        page.locator("#send").click()
        if number < len(QUESTIONS):
            page.locator("#talk .note").nth(number - 1).wait_for()
            page.wait_for_timeout(1500)  # some points for the lines
    page.locator("#talk .assistant .content p").last.wait_for()
    page.wait_for_timeout(1200)
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path, full_page="phone" in name)
    print(path.relative_to(ROOT), path.stat().st_size, "bytes")


def seeded(route: Any) -> None:
    """The same words each time."""
    body = json.loads(route.request.post_data) | {"seed": 4, "temperature": 0.8}
    route.continue_(post_data=json.dumps(body))


if __name__ == "__main__":
    main()
