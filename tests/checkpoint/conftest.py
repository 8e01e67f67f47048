from __future__ import annotations

from typing import Any

import pytest

from moe_infinity.checkpoint import reader as reader_module
from moe_infinity.checkpoint.file_state import Fingerprint
from moe_infinity.checkpoint.reader import Reader
from tests.checkpoint.gguf_originals import byte_level, sentencepiece, written


@pytest.fixture
def reader():
    reader = Reader(num_threads=2)
    yield reader
    reader.close()


@pytest.fixture
def without_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read only where a test asks: none of their bytes are kept in mind."""
    monkeypatch.setattr(
        reader_module, "fingerprint_of", lambda num_bytes, read: Fingerprint(num_bytes, "")
    )


@pytest.fixture(scope="session")
def qwen() -> dict[str, Any]:
    config = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    return written(byte_level("qwen2"), "qwen2", config)


@pytest.fixture(scope="session")
def llama() -> dict[str, Any]:
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    return written(sentencepiece(has_prefix=True), "", config)
