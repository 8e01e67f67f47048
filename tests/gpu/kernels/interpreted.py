"""Triton's interpreter, made to round as GPUs do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton import knobs
from triton.language import bfloat16, float32
from triton.runtime import interpreter

from tests.gpu.kernels.ptx_bf16 import to_bf16


def round_as_gpus_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cuts the lower half of a float32 off to make a bfloat16. Does nothing if kernels are
    compiled.
    """
    if not knobs.runtime.interpret:
        return
    builder: Any = interpreter.InterpreterBuilder
    cut = builder.create_fp_trunc

    def rounded(self: Any, source: Any, to: Any) -> Any:
        if (source.dtype.scalar, to.scalar) != (float32, bfloat16):
            return cut(self, source, to)
        numbers = np.atleast_1d(np.ascontiguousarray(source.data))
        found = to_bf16(numbers).reshape(source.data.shape)
        return interpreter.TensorHandle(found, to.scalar)

    monkeypatch.setattr(builder, "create_fp_trunc", rounded)
