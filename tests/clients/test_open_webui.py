"""Open WebUI, a page for chats, between a browser and the server."""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.clients.guide import write_under
from tests.clients.test_libraries import PROGRAMS

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(900),
    pytest.mark.environment("open-webui"),
    pytest.mark.skipif(
        not (3, 11) <= sys.version_info < (3, 13), reason="it needs Python 3.11 or 3.12"
    ),
]
# It looks for nothing on the net, and has one user, who needs no password.
VARIABLES = {
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
    "RAG_EMBEDDING_ENGINE": "openai",
    "WEBUI_AUTH": "False",
    "DATA_DIR": "data",
    "WEBUI_SECRET_KEY": "none",
}


@pytest.mark.parametrize("kind", ["plain", "stream", "tools", "structured", "cancel"])
def test_open_webui_asks_what_its_page_asks(kind, client, proxy, record_property):
    record_property("client", "Open WebUI")
    record_property("kind", kind)
    for name in ("common.py", "open_webui.py"):
        shutil.copy(PROGRAMS / name, client.work)
    (client.work / "data").mkdir()
    write_under("Open WebUI", proxy.url, client.work / "guide.sh")
    command = ["python", "open_webui.py", proxy.url, "chat", kind]
    outcome = client.run(command, limit_s=400, variables=VARIABLES)
    proxy.check(outcome, kind)
