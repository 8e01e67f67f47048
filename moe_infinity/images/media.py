"""The bytes of an image that a request names: in a data URL, or behind a URL or a path where the
server was told to look.

A rule is a folder, or the beginning of a URL. `https://` alone allows every host that has a public
address; a rule that names a host allows that host, wherever it is. Redirects need a rule, too.
"""

from __future__ import annotations

import binascii
import os
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from moe_infinity.errors import ConfigError
from moe_infinity.images.pictures import BadImage
from moe_infinity.system.files import open_no_link

MAX_BYTES = 20 << 20  # of one image
REDIRECTS = 3
FROM_URLS = bytes.maketrans(b"-_", b"+/")  # the other alphabet of base64
MOVED = (301, 302, 303, 307, 308)
READ_BYTES = 64 << 10
NONE = "none"
BASE64 = ("iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD")  # how PNG, JPEG, WEBP and GIF begin in it
PORTS = {"http": 80, "https": 443}


class Media:
    """Where images may come from. Data URLs are allowed unless the only rule is `none`.

    Raises ConfigError for a rule that is neither a folder nor the beginning of a URL.
    """

    def __init__(self, rules: Sequence[str] = ()) -> None:
        self._allows_data = NONE not in rules
        if not self._allows_data and len(rules) > 1:
            raise ConfigError("--allow-media none cannot be beside others")
        others = [rule for rule in rules if rule != NONE]
        self._urls = [urlsplit(rule) for rule in others if "://" in rule]
        for url, rule in zip(self._urls, (r for r in others if "://" in r), strict=True):
            if url.scheme not in PORTS or url.query or url.fragment or url.username:
                raise ConfigError(f"--allow-media {rule}: expected http://... or https://...")
        self._folders = [_folder(rule) for rule in others if "://" not in rule]

    def read(self, place: str, deadline: float) -> bytes:
        """Return the bytes behind a data URL, http(s) URL, file URL or absolute path, or in base64.
        Raises BadImage, also at `deadline`, of `time.monotonic`.
        """
        place = place.strip()
        if place.startswith(BASE64):
            place = f"data:;base64,{place}"
        scheme = place[:8].partition(":")[0].lower()
        if scheme == "data":
            if not self._allows_data:
                raise BadImage("this server takes no images: --allow-media none")
            return _data(place)
        if scheme in PORTS:
            return self._fetched(place, deadline)
        if scheme == "file":
            url = urlsplit(place)
            if url.netloc not in ("", "localhost"):
                raise BadImage("a file URL names a file of the server, without a host")
            place = unquote(url.path)
        if place.startswith("/"):
            return self._file(place)
        raise BadImage("expected a data URL (data:image/png;base64,...)")

    # files

    def _file(self, place: str) -> bytes:
        """All that cannot be read is refused alike: a client learns nothing about other files."""
        refused = BadImage("this file is not in a folder that --allow-media names, or not there")
        try:
            path = Path(place).resolve(strict=True)
            if not any(path.is_relative_to(folder) for folder in self._folders):
                raise refused
            with open(open_no_link(path), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise refused
                return _within(iter(lambda: file.read(READ_BYTES), b""))
        except (OSError, ValueError, RuntimeError) as error:
            if isinstance(error, BadImage):
                raise
            raise refused from error

    # URLs

    def _fetched(self, place: str, deadline: float) -> bytes:
        try:
            for _ in range(REDIRECTS + 1):
                connection, url = self._connection(place, deadline)
                with closing(connection):
                    connection.connect()
                    to = connection.sock  # which it forgets before all is read
                    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
                    headers = {"Accept": "image/*", "Accept-Encoding": "identity"}
                    connection.request("GET", target, headers=headers)
                    answer = connection.getresponse()
                    if answer.status in MOVED:
                        place = urljoin(place, answer.headers.get("Location", ""))
                        continue
                    if answer.status != 200:
                        raise BadImage(f"the image's server answers with status {answer.status}")
                    return _within(_until(deadline, to, answer))
        except (OSError, HTTPException, ValueError) as error:
            if isinstance(error, BadImage):
                raise
            raise BadImage(f"the image cannot be fetched: {type(error).__name__}") from error
        raise BadImage(f"the image's URL was redirected more than {REDIRECTS} times")

    def _connection(self, place: str, deadline: float) -> tuple[HTTPConnection, SplitResult]:
        """A connection to an address that was looked at: a name may stand for another one later."""
        url = urlsplit(place)
        rule = self._rule_for(url)
        if rule is None or url.hostname is None:
            raise BadImage("--allow-media of this server does not name this image's URL")
        port = url.port or PORTS[url.scheme]
        found = socket.getaddrinfo(url.hostname, port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in found]
        if not rule.hostname:
            addresses = list(filter(_is_public, addresses))
        if not addresses:
            raise BadImage("the image's host has no public address")
        kinds = {"http": HTTPConnection, "https": HTTPSConnection}
        connection = kinds[url.scheme](url.hostname, port, timeout=_left(deadline))
        connection._create_connection = lambda _, *args: socket.create_connection(
            (addresses[0], port), _left(deadline)
        )
        return connection, url

    def _rule_for(self, url: SplitResult) -> SplitResult | None:
        """The first rule that allows a URL."""
        if url.username is not None or url.scheme not in PORTS:
            return None
        path = unquote(url.path or "/")
        if ".." in path.split("/") or "\\" in path:
            return None
        for rule in self._urls:
            is_host = not rule.hostname or (
                rule.hostname == url.hostname
                and (rule.port or PORTS[rule.scheme]) == (url.port or PORTS[url.scheme])
            )
            begin = unquote(rule.path).rstrip("/")
            if rule.scheme == url.scheme and is_host and f"{path}/".startswith(f"{begin}/"):
                return rule
        return None


def _is_public(address: str) -> bool:
    found = ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_global


def _folder(rule: str) -> Path:
    path = Path(rule).expanduser()
    if not path.is_dir():
        raise ConfigError(
            f"--allow-media {rule}: no such folder; expected none, a folder, or the beginning of "
            "a URL as https://images.example/"
        )
    return path.resolve()


def _data(place: str) -> bytes:
    head, comma, data = place.partition(",")
    if not comma:
        raise BadImage("this data URL has no data")
    raw = unquote_to_bytes(data)
    if "base64" not in (each.strip() for each in head.lower().split(";")[1:]):
        return _within(iter([raw]))
    try:
        if not raw.isascii():
            raise binascii.Error
        raw = raw.translate(FROM_URLS).rstrip(b"= \t\r\n") + b"=="
        return _within(iter([binascii.a2b_base64(raw)]))
    except binascii.Error as error:
        raise BadImage("this image's data are no base64") from error


def _within(pieces: Iterator[bytes]) -> bytes:
    """Join pieces. Raises BadImage for more bytes than an image may have."""
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > MAX_BYTES:
            raise BadImage(f"this image has more than {MAX_BYTES >> 20} MiB")
    return bytes(data)


def _until(deadline: float, to: socket.socket, answer: HTTPResponse) -> Iterator[bytes]:
    """Yield what comes before a deadline. Raises TimeoutError."""
    piece = b" "
    while piece:
        to.settimeout(_left(deadline))
        piece = answer.read1(READ_BYTES)
        yield piece


def _left(deadline: float) -> float:
    """Return seconds until a deadline. Raises TimeoutError at its end."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the time is over")
    return seconds
