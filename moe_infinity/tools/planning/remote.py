"""A model of the hub as a folder whose weights are holes: config and headers are real, nothing else
is downloaded. Whoever reads only headers sees no difference.
"""

from __future__ import annotations

import io
import json
import struct
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from huggingface_hub import HfApi, hf_hub_download, hf_hub_url
from huggingface_hub.errors import SafetensorsParsingError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

from moe_infinity.checkpoint.file_names import INDEX as INDEX_NAME
from moe_infinity.checkpoint.file_names import WHOLE, gguf_models, gguf_parts, shards_of
from moe_infinity.cli.hub import explained
from moe_infinity.errors import CheckpointError
from moe_infinity.gguf.file import HeaderReader
from moe_infinity.loading.kind import OF_TOOLS

ANSWER_S = 20.0
HINT = "try again, or name a folder of this machine"
NUM_READERS = 8
BLOCK_BYTES = 1 << 20  # of a GGUF file, asked for at once
SINGLE = WHOLE[0]
INDEX = INDEX_NAME.format(SINGLE)
CONFIGS = ("config.json", "generation_config.json", *OF_TOOLS)


@contextmanager
def hollow_copy(model: str) -> Iterator[Path]:
    """A folder, or a GGUF file in one, for `owner/name` or `owner/name/FILE.gguf`. Gone afterwards.
    Raises CheckpointError, DownloadError, ConfigError for what is no id.
    """
    repo, file = parts_of(model)
    with tempfile.TemporaryDirectory(prefix="moe-infinity-plan-") as text:
        folder = Path(text)
        with explained(repo, folder, hint=HINT):
            info = HfApi().model_info(repo, files_metadata=True, timeout=ANSWER_S)
            sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
            source = HubFiles(repo, str(info.sha), sizes, folder)
            has_safetensors = "config.json" in sizes and not {SINGLE, INDEX}.isdisjoint(sizes)
            if file or (gguf_models(sizes) and not has_safetensors):
                path = source.copy_gguf(source.find_gguf(file))
            else:
                source.copy_safetensors()
                path = folder
        yield path


def parts_of(model: str) -> tuple[str, str]:
    """The repo, and the file within it if one is named."""
    parts = model.split("/")
    if len(parts) > 2 and model.endswith(".gguf"):
        return "/".join(parts[:2]), "/".join(parts[2:])
    return model, ""


def all_parts(file: str) -> str:
    """A pattern for a GGUF file and, of a split one, the other parts."""
    return file if len(gguf_parts(file)) == 1 else file.replace("-00001-of-", "-*-of-")


class HubFiles:
    """The files of one commit, and the folder that gets their headers."""

    def __init__(self, repo: str, commit: str, sizes: dict[str, int], folder: Path) -> None:
        self._repo = repo
        self._commit = commit
        self._sizes = sizes
        self._folder = folder
        self._api = HfApi()

    def copy_safetensors(self) -> None:
        names = [name for name in (*CONFIGS, INDEX) if name in self._sizes]
        for name in names:
            hf_hub_download(self._repo, name, revision=self._commit, local_dir=self._folder)
        for name in self._shards():
            if name not in self._sizes:
                raise CheckpointError(f"{self._repo}: the index names {name}, which is not there")
        with ThreadPoolExecutor(NUM_READERS) as pool:
            list(pool.map(self._copy_header, self._shards()))

    def _shards(self) -> Sequence[str]:
        if SINGLE in self._sizes:
            return [SINGLE]
        if INDEX not in self._sizes:
            raise CheckpointError(
                f"{self._repo}: no safetensors or GGUF file, and only their headers can be read "
                f"from afar\nhint: `moe-infinity pull {self._repo}` first"
            )
        try:
            return shards_of(self._folder / INDEX)
        except CheckpointError as error:
            raise CheckpointError(f"{self._repo}: {INDEX} is not an index: {error}") from error

    def _copy_header(self, name: str) -> None:
        try:
            found = self._api.parse_safetensors_file_metadata(
                self._repo, name, revision=self._commit, timeout=ANSWER_S
            )
        except SafetensorsParsingError as error:
            raise CheckpointError(f"{self._repo}: {name}: no safetensors file: {error}") from error
        header: dict[str, Any] = {
            tensor: {"dtype": one.dtype, "shape": one.shape, "data_offsets": one.data_offsets}
            for tensor, one in found.tensors.items()
        }
        text = json.dumps(header).encode()
        end = max((one.data_offsets[1] for one in found.tensors.values()), default=0)
        path = self._place_of(name)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)

    def find_gguf(self, file: str) -> str:
        """The file that is named, or the only model. Raises CheckpointError."""
        models = gguf_models(self._sizes)
        if file in self._sizes:
            return file
        if len(models) == 1 and not file:
            return models[0]
        if not models:
            raise CheckpointError(f"{self._repo}: neither config.json nor a GGUF file is there")
        shown = "\n".join(f"  {self._repo}/{name}" for name in models)
        what = f"no {file}" if file else "several GGUF models, name one of them"
        raise CheckpointError(f"{self._repo}: {what}; there are:\n{shown}")

    def copy_gguf(self, name: str) -> Path:
        """With its other parts, if it has any."""
        for each in gguf_parts(name):
            if each not in self._sizes:
                raise CheckpointError(f"{self._repo}: {name} lacks its part {each}")
            path = self._place_of(each)
            with path.open("wb") as file:
                file.truncate(self._sizes[each])
            remote = RangeFile(self._repo, each, self._commit, self._sizes[each], path)
            HeaderReader(path, cast(BinaryIO, io.BufferedReader(remote, BLOCK_BYTES))).header()
        return self._place_of(name)

    def _place_of(self, name: str) -> Path:
        """Where a file of the hub goes. Raises CheckpointError for a name that leads elsewhere."""
        pure = PurePosixPath(name)
        if pure.is_absolute() or ".." in pure.parts:
            raise CheckpointError(f"{self._repo}: names {name}, a file outside of the folder")
        path = self._folder / pure
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class RangeFile(io.RawIOBase):
    """A file of the hub, read from its first byte on; what was read is in the copy, too."""

    def __init__(self, repo: str, name: str, commit: str, size: int, copy: Path) -> None:
        self._url = hf_hub_url(repo, name, revision=commit)
        self._size = size
        self._copy = copy
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        end = min(self._at + len(buffer), self._size)
        if end <= self._at:
            return 0
        headers = build_hf_headers() | {"range": f"bytes={self._at}-{end - 1}"}
        answer = http_backoff("GET", self._url, headers=headers, timeout=ANSWER_S)
        hf_raise_for_status(answer)
        content = answer.content[: end - self._at]
        with self._copy.open("r+b") as file:
            file.seek(self._at)
            file.write(content)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)
