"""Kernels of each kind are kept for the next start. What a kernel is made of may not differ from
start to start, as functions do that are made anew.
"""

from __future__ import annotations

from typing import Any

import pytest

from moe_infinity.kernels.cpu.decoder_call import layer_function
from moe_infinity.kernels.cpu.delta_rule import delta_function
from moe_infinity.kernels.cpu.panels import panel_function
from moe_infinity.kernels.cpu.prompt_rows import rows_function
from moe_infinity.kernels.cpu.rows import row_function
from moe_infinity.kernels.cpu.shared_expert import input_function
from moe_infinity.kernels.cpu.steps import InnerLoop
from moe_infinity.kernels.cpu.widen import widening_function

LOOP = InnerLoop("f32", 1, 1, None, has_zeros=False)
MADE = [
    (row_function, [LOOP], {}),
    (panel_function, [LOOP], {"is_half": False}),
    (widening_function, [LOOP], {}),
    (rows_function, [False], {}),
    (layer_function, ["f32", 1], {}),
    (delta_function, [], {}),
    (input_function, [], {}),
]


@pytest.mark.parametrize(
    ("make", "args", "kwargs"), MADE, ids=[make.__module__.split(".")[-1] for make, *_ in MADE]
)
def test_a_kernel_that_was_compiled_before_is_loaded(
    make: Any, args: list[Any], kwargs: dict[str, Any]
) -> None:
    make.__wrapped__(*args, **kwargs)
    assert make.__wrapped__(*args, **kwargs).cache_hits == 1
