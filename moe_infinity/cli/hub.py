"""Models of a hub: which files are to be downloaded, and downloading them. Without torch.

huggingface_hub has the protocol and the cache folder, which all its users share. After an
interruption it keeps whole files; one that was under way begins anew.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import filter as matching
from functools import partial
from glob import escape
from multiprocessing import TimeoutError as NotYet
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from huggingface_hub import (
    HfApi,
    constants,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # of httpx, or of httpx2 since huggingface_hub 2
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects, tqdm
from rich.filesize import decimal

from moe_infinity.checkpoint.file_names import INDEX, WHOLE, gguf_models, gguf_parts, shards_of
from moe_infinity.errors import ConfigError, DownloadError, MoEInfinityError, UnsupportedModelError
from moe_infinity.system.files import is_known, nearest_folder

ANSWER_S = 20.0
NUM_TRANSFERS = 4  # at once
GLANCE_S = 0.1  # between two looks at how much is there
# At the top of a repo, beside the weights: config, tokenizer, chat template, code of the model.
SMALL_FILES = (
    "*.json", "*.jinja", "*.py", "*.tiktoken", "*.model", "merges.txt", "vocab.txt",
    "additional_chat_templates/*.jinja",
)  # fmt: skip

OnBytes = Callable[[int, int], None]  # bytes here, of how many


class HubFile(NamedTuple):
    name: str
    num_bytes: int
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

    def bytes_here(self) -> int:
        """Bytes of the files that are here."""
        return sum(file.num_bytes for file in self.files if self._is_here(file))

    def _is_here(self, file: HubFile) -> bool:
        path = try_to_load_from_cache(self.model, file.name, self.cache, self.commit)
        # 0: the hub does not say.
        return isinstance(path, str) and file.num_bytes in (0, os.path.getsize(path))

    def _fetch(self, file: HubFile, bar: type[tqdm]) -> None:
        """Download a file. One that is here is not whole, and begins anew."""
        path = try_to_load_from_cache(self.model, file.name, self.cache, self.commit)
        hf_hub_download(
            self.model,
            file.name,
            revision=self.commit,
            cache_dir=self.cache,
            force_download=isinstance(path, str),
            tqdm_class=bar,
        )

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

    def run(self, on_bytes: OnBytes = lambda here, total: None) -> Path:
        """Bring what is missing, and return the folder with all files. `on_bytes` gets bytes that
        are here and of all files, again and again. Raises DownloadError.
        """
        self.require_room()
        here = self.bytes_here()
        missing = [file for file in self.files if not self._is_here(file)]
        bars: list[tqdm] = []
        stop = Event()
        bar = _bar_of(bars, stop)
        try:
            # Threads of a ThreadPool do not keep a process from ending, as after Ctrl-C.
            with explained(self.model, self.cache), ThreadPool(NUM_TRANSFERS) as pool:
                on_bytes(here, self.num_bytes)
                fetched = pool.imap_unordered(partial(self._fetch, bar=bar), missing)
                while not _is_at_end(fetched):
                    on_bytes(here + sum(int(each.n) for each in bars), self.num_bytes)
                on_bytes(self.num_bytes, self.num_bytes)
                # All files are here: this gives the revision its name in the cache.
                names = [escape(file.name) for file in self.files]
                return Path(
                    snapshot_download(
                        self.model,
                        revision=self.revision,
                        cache_dir=self.cache,
                        allow_patterns=names,
                        tqdm_class=bar,
                    )
                )
        finally:
            stop.set()


def _is_at_end(results: Any) -> bool:
    """Wait a moment for the next of a pool's results. Raises what a job raised."""
    try:
        results.next(GLANCE_S)
    except NotYet:
        pass
    except StopIteration:
        return True
    return False


def _bar_of(bars: list[tqdm], stop: Event) -> type[tqdm]:
    """A class for huggingface_hub whose bars are in `bars`, count bytes, show nothing, and end a
    transfer once `stop` is set.
    """

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            untyped: Any = super()
            untyped.__init__(*args, **kwargs | {"disable": True})
            bars.append(self)

        def update(self, n: float | None = 1) -> None:
            if stop.is_set():
                raise DownloadError("stopped")
            self.n += n or 0

        def update_transfer(self, n: float | None = 1) -> None:
            """Bytes on the way are no bytes of a file."""

    return Bar


def find_download(
    model: str, *, include: Sequence[str] = (), revision: str | None = None
) -> Download:
    """Return the files that this library reads of a model on the hub: its weights in one format,
    config, tokenizer, chat template. `include`: take files of these patterns for weights instead.

    Raises ConfigError, DownloadError, UnsupportedModelError.
    """
    cache = Path(constants.HF_HUB_CACHE)
    if not is_known(cache):
        raise ConfigError(f"{cache}: this user has no home folder; HF_HOME may name another place")
    with explained(model, cache, revision=revision):
        info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=ANSWER_S)
        assert info.sha is not None, model
        files = {
            sibling.rfilename: HubFile(
                sibling.rfilename, sibling.size or 0, sibling.lfs is not None
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
            HubFile(name, sum(files[p].num_bytes for p in gguf_parts(name) if p in files), True)
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


GOES_ON = "the same command goes on with what was downloaded"
NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def explained(
    model: str, cache: Path, *, revision: str | None = None, hint: str = GOES_ON
) -> Iterator[None]:
    """Raises ConfigError for what is no id, DownloadError for all that goes wrong with a hub, the
    network or the disk. `hint` is for what may go well another time.
    """
    try:
        yield
    except MoEInfinityError:
        raise
    except HFValidationError as error:
        raise ConfigError(
            f"{model!r} is no id of a model, such as Qwen/Qwen3-30B-A3B: {error}"
        ) from error
    except (HTTPError, OSError, RuntimeError, ValueError) as error:  # the last two of hf_xet
        raise DownloadError(
            f"{model}: {_explanation(error, model, cache, revision, hint)}"
        ) from error


def _explanation(error: Exception, model: str, cache: Path, revision: str | None, hint: str) -> str:
    hub = constants.ENDPOINT
    match error:
        case OfflineModeIsEnabled():
            return (
                "is not on this machine, and HF_HUB_OFFLINE is set\n"
                "hint: unset it, or copy the model's folder from another machine"
            )
        case GatedRepoError():
            return (
                "its owners give it to those who accept their terms\n"
                f"hint: accept them at {hub}/{model}, then `hf auth login`, or set HF_TOKEN"
            )
        case RevisionNotFoundError():
            return f"has no revision {revision}\nhint: {hub}/{model}/tree/main lists them"
        case RepositoryNotFoundError():
            return _not_found(hub)
        case HfHubHTTPError():
            status = error.response.status_code
            return (
                _not_found(hub)
                if status in (401, 403)
                else f"{hub} answered {status}\nhint: {hint}"
            )
        case HTTPError() | LocalEntryNotFoundError():
            return f"no answer from {hub}: {error}\nhint: check the network; {hint}"
        case OSError() if error.errno in FULL:
            return f"{cache}: the disk is full\nhint: make room; {hint}"
        case OSError() if error.errno in NOT_WRITABLE:
            return (
                f"{error.filename or cache} cannot be written: {error.strerror}\n"
                "hint: set HF_HUB_CACHE to a folder of yours"
            )
    return f"{error}\nhint: {hint}"


def _not_found(hub: str) -> str:
    return (
        f"{hub} has no such model, or not for you\n"
        "hint: check the spelling; for a private one `hf auth login`, or set HF_TOKEN"
    )
