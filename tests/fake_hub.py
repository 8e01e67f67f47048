"""A model hub on localhost: what huggingface_hub asks of one, with faults on demand.

    with FakeHub() as hub:
        hub.add("some/model", folder)
        hub.used_here(monkeypatch, cache)          # by this process
        subprocess.run(..., env=hub.environment(cache))
        hub.faults.cut_at = 1000                   # see Faults
        hub.requests                               # what was asked so far

A repo is a folder, read anew for each answer. Weights are LFS files (their ETag is a sha256), all
others are git's (their ETag is git's hash). Nothing is said of Xet, so that no client uses it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest
from huggingface_hub import close_session

LFS_SUFFIXES = (".safetensors", ".bin", ".gguf", ".npz", ".pth", ".onnx", ".h5")
CHUNK = 1 << 16
RANGE = re.compile(r"bytes=(\d*)-(\d*)")
API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<rev>[^/]+))?")
RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)")


class Request(NamedTuple):
    """What a client asked for."""

    method: str
    path: str  # without its query
    range: str | None  # the header
    token: str | None


@dataclass
class Faults:
    """What goes wrong; may be set at any time."""

    cut_at: int | None = None  # bytes of a file's answer after which its connection ends
    num_cuts: int | None = None  # how often that happens; None: always
    resumes: Event | None = None  # what such an answer waits for, instead of ending
    status: int | None = None  # of every answer, e.g. 500
    delay_s: float = 0.0  # before each chunk of a file, 64 KiB
    gated: set[str] = field(default_factory=set)  # repos that want a token
    hidden: set[str] = field(default_factory=set)  # files listed, but not found

    def cuts(self) -> bool:
        """Whether this answer is to be cut; counts it."""
        if self.cut_at is None or self.num_cuts == 0:
            return False
        if self.num_cuts is not None:
            self.num_cuts -= 1
        return True


class Repo(NamedTuple):
    folder: Path
    revisions: dict[str, str]  # names -> commit hashes

    def files(self) -> list[dict[str, Any]]:
        """As `/tree` lists them."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return [self.entry(path.relative_to(self.folder).as_posix()) for path in paths]

    def entry(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        status = file.stat()
        sha256, git_hash = hashes_of(file, status.st_size, status.st_mtime_ns)
        entry = {"type": "file", "path": name, "size": status.st_size, "oid": git_hash}
        if file.suffix in LFS_SUFFIXES:
            entry["lfs"] = {"oid": sha256, "size": status.st_size, "pointerSize": 135}
        return entry


@cache
def hashes_of(file: Path, size: int, _changed_at: int) -> tuple[str, str]:
    """sha256, and the hash that git gives the file."""
    content = file.read_bytes()
    git_hash = hashlib.sha1(b"blob %d\0" % size + content).hexdigest()
    return hashlib.sha256(content).hexdigest(), git_hash


def as_sibling(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of `/tree` as the description of a model lists it."""
    sibling = {"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"]}
    if "lfs" in entry:
        sibling["lfs"] = entry["lfs"] | {"sha256": entry["lfs"]["oid"]}
    return sibling


class ForgivingServer(ThreadingHTTPServer):
    """A server to which a client that leaves is no error: it would be told in the output of
    whatever test runs then.
    """

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class FakeHub:
    """Serves from construction to `close()`; also a context manager."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.requests: list[Request] = []
        self.lock = Lock()
        self.repos: dict[str, Repo] = {}
        self._server = ForgivingServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        vars(self._server)["hub"] = self
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def add(self, repo_id: str, folder: Path, *, revisions: tuple[str, ...] = ("main",)) -> str:
        """Offer a folder as a repo. Returns the hash of its only commit."""
        commit = hashlib.sha1(f"{repo_id} {folder}".encode()).hexdigest()
        self.repos[repo_id] = Repo(folder, {name: commit for name in (*revisions, commit)})
        return commit

    def bytes_asked(self, name: str) -> list[str | None]:
        """The ranges of all downloads of a file, in their order; None is all of it."""
        gets = [request for request in self.requests if request.method == "GET"]
        return [request.range for request in gets if request.path.endswith(f"/{name}")]

    def environment(self, cache: Path) -> dict[str, str]:
        """The variables of a process whose hub this is, with a cache folder of its own."""
        ours = {
            "HF_ENDPOINT": self.endpoint,
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_TOKEN": "",
            "NO_PROXY": "127.0.0.1",
        }
        return os.environ | ours

    def used_here(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Make this the hub of this process, which has read its environment long ago."""
        constants = huggingface_hub.constants
        template = self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        for name, value in self.environment(cache).items():
            if os.environ.get(name) != value:
                monkeypatch.setenv(name, value)  # of processes that it starts
        close_session()  # it may have been made for other proxies

    def close(self) -> None:
        """Connections are refused from now on."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(5)
            close_session()  # the client's end of connections that were kept

    def __enter__(self) -> FakeHub:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub: FakeHub = vars(self.server)["hub"]
        path = unquote(urlsplit(self.path).path)
        header = self.headers.get("Range")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        with hub.lock:
            hub.requests.append(Request(self.command, path, header, token))
        raw = urlsplit(self.path).path  # a revision may have a quoted slash
        match = API.fullmatch(raw) or RESOLVE.fullmatch(raw)
        try:
            if hub.faults.status is not None:
                self._refuse(hub.faults.status, "", "as the test wants it")
            elif match is None or (repo := hub.repos.get(match["repo"])) is None:
                self._refuse(401, "", "Invalid username or password.")  # as the real one does
            elif match["repo"] in hub.faults.gated and token is None:
                self._refuse(401, "GatedRepo", "Access to this model is restricted.")
            else:
                self._answer_for(hub, repo, match)
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client went away

    def _answer_for(self, hub: FakeHub, repo: Repo, match: re.Match[str]) -> None:
        commit = repo.revisions.get(unquote(match["rev"] or "main"))
        if commit is None:
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
        elif match.re is RESOLVE:
            name = unquote(match["path"])
            if name in hub.faults.hidden or not (repo.folder / name).is_file():
                self._refuse(404, "EntryNotFound", "Entry not found", commit)
            else:
                self._send_file(hub, repo, name, commit)
        elif match["what"] == "tree":
            self._send_json(repo.files())
        else:
            siblings = list(map(as_sibling, repo.files()))
            self._send_json({"id": match["repo"], "sha": commit, "siblings": siblings})

    def _send_json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, hub: FakeHub, repo: Repo, name: str, commit: str) -> None:
        entry = repo.entry(name)
        size = entry["size"]
        first, end = self._asked(size)
        if first >= end and size:
            self._refuse(416, "", "Range Not Satisfiable", commit)
            return
        is_part = "Range" in self.headers
        self.send_response(206 if is_part else 200)
        if is_part:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{size}")
        etag = entry.get("lfs", entry)["oid"]
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - first))
        self.end_headers()
        if self.command == "GET":
            self._send_bytes(hub.faults, repo.folder / name, first, end)

    def _send_bytes(self, faults: Faults, file: Path, first: int, end: int) -> None:
        cut_at = min(end, first + (faults.cut_at or 0)) if faults.cuts() else end
        with file.open("rb") as opened:
            opened.seek(first)
            self._send_until(opened, cut_at, faults.delay_s)
            if cut_at < end and faults.resumes is not None:
                faults.resumes.wait(60)
                self._send_until(opened, end, faults.delay_s)
            self.close_connection = opened.tell() < end

    def _send_until(self, opened: BinaryIO, last: int, delay_s: float) -> None:
        while (left := last - opened.tell()) > 0:
            time.sleep(delay_s)
            self.wfile.write(opened.read(min(CHUNK, left)))

    def _asked(self, size: int) -> tuple[int, int]:
        """The first byte and the one after the last."""
        match = RANGE.fullmatch(self.headers.get("Range") or "bytes=0-")
        assert match is not None, self.headers["Range"]
        first, last = match.groups()
        if not first:  # the last bytes
            return max(0, size - int(last)), size
        return int(first), min(size, int(last) + 1) if last else size

    def _refuse(self, status: int, code: str, message: str, commit: str | None = None) -> None:
        self.send_response(status)
        self.send_header("X-Error-Message", message)
        if code:
            self.send_header("X-Error-Code", code)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()
