from __future__ import annotations

import pytest

from moe_infinity.checkpoint.reader import Reader


@pytest.fixture
def reader():
    reader = Reader(num_threads=2)
    yield reader
    reader.close()
