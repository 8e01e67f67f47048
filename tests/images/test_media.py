"""Where images may come from: nothing is read, and nobody is asked, but where a rule says so."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from moe_infinity.errors import ConfigError
from moe_infinity.images import media
from moe_infinity.images.media import Media
from moe_infinity.images.pictures import BadImage
from tests.fake_hub import ForgivingServer
from tests.images.files import encoded, picture

DATA = b"some bytes"
MANY = 3 << 20


class Handler(BaseHTTPRequestHandler):
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to"))
            self.end_headers()
            return
        if self.path.startswith("/away/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/away/"))
            self.end_headers()
            return
        self.send_response(200 if self.path.startswith("/good") else 404)
        self.end_headers()
        if "slow" in self.path:
            for _ in range(40):
                self.wfile.write(b"x")
                time.sleep(0.05)
        self.wfile.write(bytes(MANY) if "large" in self.path else DATA)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ForgivingServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def read(rules: list[str], place: str, seconds: float = 10.0) -> bytes:
    return Media(rules).read(place, time.monotonic() + seconds)


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_data_urls_are_read_by_default_and_nothing_else(site, tmp_path):
    (tmp_path / "a.png").write_bytes(DATA)
    assert read([], data_url(DATA)) == DATA
    assert read([], "data:,some%20bytes") == DATA
    for place in (f"{site}/good", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png", "a.png", ""):
        with pytest.raises(BadImage):
            read([], place)


OTHER = bytes(range(248, 256)) * 5  # has both signs in which alphabets of base64 differ
IN_BASE64 = base64.b64encode(OTHER).decode()
FOR_URLS = base64.urlsafe_b64encode(OTHER).decode()


@pytest.mark.parametrize(
    "place",
    [
        f"DATA:IMAGE/PNG;BASE64,{IN_BASE64}",
        f"data:image/png;charset=utf-8;name=a%20b.png;base64,{IN_BASE64}",
        f"data:image/png;base64;charset=utf-8,{IN_BASE64}",
        f"data:image/png; base64, {IN_BASE64}",
        f" data:image/png;base64,{IN_BASE64}\n",
        f"data:image/png;base64,{base64.encodebytes(OTHER).decode()}",
        f"data:image/png;base64,{quote(IN_BASE64, safe='')}%0A",
        f"data:image/png;base64,{FOR_URLS}",
        f"data:image/png;base64,{FOR_URLS.rstrip('=')}",
        f"data:image/png,{quote(OTHER)}",
    ],
)
def test_a_data_url_is_read_in_each_way_to_write_it(place):
    assert {"+", "/"} < {*IN_BASE64}
    assert read([], place) == OTHER


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_base64_of_an_image_needs_no_beginning_of_a_url(kind):
    data = encoded(picture(1, 8, 8), kind)
    assert read([], base64.b64encode(data).decode()) == data
    with pytest.raises(BadImage, match="takes no images"):
        read(["none"], base64.b64encode(data).decode())


@pytest.mark.parametrize("place", ["data:image/png", "data:;base64,é", "ftp://a"])
def test_a_place_that_means_nothing_is_refused(place):
    with pytest.raises(BadImage):
        read([], place)


def test_none_refuses_data_urls_too():
    with pytest.raises(BadImage, match="takes no images"):
        read(["none"], data_url(DATA))


def test_a_url_is_fetched_where_a_rule_names_its_beginning(site):
    assert read([f"{site}/good"], f"{site}/good") == DATA
    assert read([f"{site}/good"], f"{site}/good/a.png?size=2") == DATA
    assert read([f"{site}/"], f"{site}/good") == DATA
    for place in (f"{site}/goods", f"{site}/good/../bad", f"{site}/good/%2e%2e/bad", f"{site}/x"):
        with pytest.raises(BadImage, match="does not name"):
            read([f"{site}/good"], place)


def test_what_is_named_otherwise_is_another_host(site):
    port = site.rpartition(":")[2]
    for place in (
        f"http://localhost:{port}/good",
        f"https://127.0.0.1:{port}/good",
        "http://127.0.0.1/good",
        f"http://user@127.0.0.1:{port}/good",
        f"http://127.0.0.1:{port}@example.org/good",
    ):
        with pytest.raises(BadImage):
            read([f"{site}/"], place)


def test_a_rule_for_all_hosts_leads_to_no_private_address(site, monkeypatch):
    Handler.asked.clear()
    for name in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "2130706433"):
        port = site.rpartition(":")[2]
        with pytest.raises(BadImage):
            read(["http://"], f"http://{name}:{port}/good")
    for address in ("10.1.2.3", "169.254.169.254", "fe80::1", "fd00::1", "::ffff:127.0.0.1"):
        answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, found=answers, **options: found)
        with pytest.raises(BadImage, match="no public address"):
            read(["http://", "https://"], "https://images.example/a.png")
    assert Handler.asked == []


def test_the_address_that_was_looked_at_is_the_one_that_is_asked(site, monkeypatch):
    """A name may stand for another address at the second look."""
    port = int(site.rpartition(":")[2])
    asked = []

    def look_up(host: str, *args: Any, **options: Any) -> list[Any]:
        asked.append(host)
        address = "127.0.0.1" if host == "127.0.0.1" or len(asked) == 1 else "127.0.0.2"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert read([f"http://images.example:{port}/"], f"http://images.example:{port}/good") == DATA
    assert asked == ["images.example", "127.0.0.1"]


def test_a_redirect_needs_a_rule_too_and_their_number_is_bounded(site):
    assert read([f"{site}/"], f"{site}/to/good") == DATA
    for place in ("away/http://127.0.0.1:1/good", "away/file:///etc/passwd", "to/" * 9 + "good"):
        with pytest.raises(BadImage):
            read([f"{site}/"], f"{site}/{place}")
    with pytest.raises(BadImage, match="does not name"):
        read([f"{site}/to"], f"{site}/to/good")


def test_size_and_time_are_bounded(site, monkeypatch):
    monkeypatch.setattr(media, "MAX_BYTES", 2 << 20)
    for place in (f"{site}/good/large", data_url(bytes(MANY))):
        with pytest.raises(BadImage, match="more than 2 MiB"):
            read([f"{site}/"], place)
    with pytest.raises(BadImage, match="TimeoutError"):
        read([f"{site}/"], f"{site}/good/slow", seconds=0.3)
    with pytest.raises(BadImage, match="status 404"):
        read([f"{site}/"], f"{site}/bad")


def test_a_file_is_read_in_folders_that_rules_name(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "a b.png").write_bytes(DATA)
    (tmp_path / "secret.png").write_bytes(DATA)
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    (inside / "folder").mkdir()
    rules = [str(inside)]
    assert read(rules, str(inside / "a b.png")) == DATA
    assert read(rules, f"file://{inside}/a%20b.png") == DATA
    assert read(rules, f"file://localhost{inside}/a%20b.png") == DATA
    for place in (
        tmp_path / "secret.png",
        inside / "link.png",
        inside / ".." / "secret.png",
        inside / "absent.png",
        inside / "folder",
        Path("/dev/zero"),
        Path("/a\0b"),
    ):
        with pytest.raises(BadImage, match="not in a folder"):
            read(rules, str(place))
    with pytest.raises(BadImage):
        read(rules, f"file://elsewhere{inside}/a%20b.png")


def test_a_device_in_an_allowed_folder_is_no_file():
    with pytest.raises(BadImage, match="not in a folder"):
        read(["/dev"], "/dev/zero")


@pytest.mark.parametrize(
    "rules", [["/no/such/folder"], ["ftp://a/"], ["none", "/tmp"], ["https://a/?b=c"], ["relative"]]
)
def test_a_rule_that_means_nothing_is_an_error_at_the_start(rules):
    with pytest.raises(ConfigError, match="--allow-media"):
        Media(rules)
