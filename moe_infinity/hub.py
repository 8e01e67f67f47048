"""Models of a hub: which files are to be downloaded, and downloading them.

    find_download      asks the hub what there is, and chooses what this library reads
    Download.run       LFS files by `_fetch`, which goes on where an earlier run was stopped;
                       then snapshot_download for the rest: small files, names in the cache

huggingface_hub has the protocol and the cache folder, which all its users share. It begins a file
anew in every process (1.33), so `_fetch` keeps the bytes of a file that is not whole where earlier
versions kept them. Files above 50 GB come by Xet only, from their beginning. Without torch.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import filter as matching
from functools import partial
from glob import escape
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants, hf_hub_download, hf_hub_url, snapshot_download
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers, filter_repo_objects, tqdm
from huggingface_hub.utils.sha import sha_fileobj
from rich.filesize import decimal

from moe_infinity.checkpoint.file_names import INDEX, WHOLE, gguf_models, gguf_parts, shards_of
from moe_infinity.errors import ConfigError, DownloadError, UnsupportedModelError
from moe_infinity.hub_errors import explained
from moe_infinity.system.files import nearest_folder

ANSWER_S = 20.0
NUM_TRANSFERS = 4  # at once
GLANCE_S = 0.1  # between two looks at how much is there
END_S = 0.5  # for transfers to stop after an error or Ctrl-C; one that waits for the hub is left
# At the top of a repo, beside the weights: config, tokenizer, chat template, code of the model.
SMALL_FILES = (
    "*.json", "*.jinja", "*.py", "*.tiktoken", "*.model", "merges.txt", "vocab.txt",
    "additional_chat_templates/*.jinja",
)  # fmt: skip

OnBytes = Callable[[int, int], None]  # bytes here, of how many


class HubFile(NamedTuple):
    name: str
    num_bytes: int
    blob: str  # what its bytes are called in the cache: their hash
    is_lfs: bool


@dataclass(frozen=True, slots=True)
class Download:
    """Files of one commit of a model, some of which may be here."""

    model: str
    revision: str
    commit: str
    files: tuple[HubFile, ...]
    cache: Path  # the folder of all models

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def folder(self) -> Path:
        """Where the files will be, by their names."""
        return self._repo / "snapshots" / self.commit

    @property
    def _repo(self) -> Path:
        return self.cache / repo_folder_name(repo_id=self.model, repo_type="model")

    def bytes_here(self, *, under_way: bool = False) -> int:
        """Bytes that need not be downloaded any more. `under_way`: also those that huggingface_hub
        would drop.
        """
        ending = "*.incomplete" if under_way else ".incomplete"
        sizes = _sizes_in(self._repo / "blobs")
        here = 0
        for file in self.files:
            if file.blob in sizes or (self.folder / file.name).exists():
                here += file.num_bytes
            else:
                parts = matching(sizes, f"{file.blob}{ending}")
                here += min(file.num_bytes, max((sizes[part] for part in parts), default=0))
        return here

    def require_room(self) -> None:
        """Raises DownloadError if the disk has no room for what is missing."""
        missing = self.num_bytes - self.bytes_here()
        free = shutil.disk_usage(nearest_folder(self.cache)).free
        if missing > free:
            raise DownloadError(
                f"{self.model}: {decimal(missing)} are to be downloaded, {self.cache} has "
                f"{decimal(free)} free: {decimal(missing - free)} too little\n"
                "hint: make room, or set HF_HUB_CACHE to a folder on a larger disk"
            )

    def run(self, on_bytes: OnBytes = lambda here, total: None) -> None:
        """Bring what is missing. `on_bytes` gets bytes that are here and of all files, again and
        again. After an interruption the same call goes on. Raises DownloadError.
        """
        self.require_room()
        stop = Event()
        bar = _bar_until(stop)
        fetched = [partial(self._fetch, f, bar) for f in self.files if self._is_to_fetch(f)]

        def glance() -> None:
            on_bytes(self.bytes_here(under_way=True), self.num_bytes)

        with explained(self.model, self.cache):
            (self._repo / "blobs").mkdir(parents=True, exist_ok=True)
            for jobs in (fetched, [partial(self._complete, bar)]):
                _do_all(jobs, glance, stop)

    def _is_to_fetch(self, file: HubFile) -> bool:
        if not file.is_lfs or file.num_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
            return False
        return not (self.folder / file.name).exists()

    def _fetch(self, file: HubFile, bar: type[tqdm]) -> None:
        """Bring the bytes of one file, from where they end here."""
        blob = self._repo / "blobs" / file.blob
        incomplete = blob.with_name(f"{file.blob}.incomplete")
        lock = self.cache / ".locks" / self._repo.name / f"{file.blob}.lock"  # huggingface_hub's
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            if blob.exists():
                return
            if incomplete.exists() and incomplete.stat().st_size > file.num_bytes:
                incomplete.unlink()
            with incomplete.open("ab") as opened:
                before = opened.tell()
                http_get(
                    hf_hub_url(self.model, file.name, revision=self.commit),
                    opened,
                    resume_size=before,
                    headers=build_hf_headers(),
                    expected_size=file.num_bytes,
                    tqdm_class=bar,
                )
            if before:  # it may have been there for long
                _require_hash(incomplete, file)
            incomplete.replace(blob)

    def _complete(self, bar: type[tqdm]) -> None:
        snapshot_download(
            self.model,
            revision=self.revision,
            cache_dir=self.cache,
            allow_patterns=[escape(file.name) for file in self.files],
            tqdm_class=bar,
            max_workers=NUM_TRANSFERS,
        )


def find_download(
    model: str, *, include: Sequence[str] = (), revision: str | None = None
) -> Download:
    """What this library reads of a model on the hub: its weights in one format, config, tokenizer,
    chat template. `include`: take files of these patterns for weights instead.

    Raises ConfigError, DownloadError, UnsupportedModelError.
    """
    cache = Path(constants.HF_HUB_CACHE)
    with explained(model, cache, revision=revision):
        info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=ANSWER_S)
        assert info.sha is not None, model
        files = {
            sibling.rfilename: HubFile(
                sibling.rfilename,
                sibling.size or 0,
                str(sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256),
                sibling.lfs is not None,
            )
            for sibling in info.siblings or ()
        }
        if include:
            weights = list(filter_repo_objects(files, allow_patterns=list(include)))
            if not weights:
                raise ConfigError(
                    f"{model}: no file fits {' or '.join(include)}; there are:\n"
                    + _listed(file for file in files.values() if file.is_lfs)
                )
        else:
            weights = _weights(model, files, info.sha)
    names = {*weights, *filter(_is_small, files)}
    chosen = tuple(file for name, file in files.items() if name in names)
    return Download(model, revision or constants.DEFAULT_REVISION, info.sha, chosen, cache)


def _weights(model: str, files: dict[str, HubFile], commit: str) -> list[str]:
    for name in WHOLE:
        index = INDEX.format(name)
        if name in files:
            return [name]
        if index in files:
            path = Path(hf_hub_download(model, index, revision=commit))
            return [index, *shards_of(path)]
    found = gguf_models(files)
    if len(found) > 1:
        models = [
            HubFile(name, sum(files[p].num_bytes for p in gguf_parts(name) if p in files), "", True)
            for name in found
        ]
        raise ConfigError(
            f"{model}: several GGUF models, choose one:\n{_listed(models)}\n"
            f"hint: moe-infinity pull {model} --include '{Path(found[0]).name}'"
        )
    if not found:
        raise UnsupportedModelError(
            f"{model}: no weights that this library reads: no model.safetensors, "
            "pytorch_model.bin or GGUF file, and no index of them"
        )
    return gguf_parts(found[0])


def _listed(files: Iterable[HubFile]) -> str:
    return "\n".join(f"  {decimal(file.num_bytes):>9}  {file.name}" for file in files)


def _is_small(name: str) -> bool:
    patterns = [pattern for pattern in SMALL_FILES if pattern.count("/") == name.count("/")]
    return not name.endswith(".index.json") and any(matching([name], p) for p in patterns)


def _sizes_in(folder: Path) -> dict[str, int]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries}
    except OSError:  # not there yet, or a file was just renamed
        return {}


def _require_hash(path: Path, file: HubFile) -> None:
    with path.open("rb") as opened:
        found = sha_fileobj(opened).hex()
    if found != file.blob:
        path.unlink()
        raise DownloadError(
            f"{file.name}: was resumed, and is damaged: sha256 {found}, expected {file.blob}\n"
            "hint: the same command downloads it anew"
        )


def _bar_until(stop: Event) -> type[tqdm]:
    """For huggingface_hub: shows nothing, and ends a transfer once `stop` is set."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            untyped: Any = super()
            untyped.__init__(*args, **kwargs | {"disable": True})

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise DownloadError("stopped")

    return Bar


def _do_all(jobs: Sequence[Callable[[], None]], glance: Callable[[], None], stop: Event) -> None:
    """Do the jobs, several at once, and glance meanwhile. Raises the first error, and sets `stop`
    then. The threads do not keep a process from ending.
    """
    glance()  # at what is here before anything comes
    waiting = iter(jobs)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for job in waiting:
                job()
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=work, daemon=True) for _ in jobs[:NUM_TRANSFERS]]
    for thread in threads:
        thread.start()
    try:
        while any(thread.is_alive() for thread in threads):
            if errors:
                raise errors[0]
            time.sleep(GLANCE_S)
            glance()
        for error in errors:
            raise error
    except BaseException:
        stop.set()
        for thread in threads:
            thread.join(END_S / len(threads))
        raise
