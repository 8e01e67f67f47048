"""The compressed-tensors package, which defines its formats; tests that compare with it are skipped
where it is not installed.
"""

from __future__ import annotations

from typing import Any

import pytest


def compressor(name: str) -> Any:
    reason = "compressed-tensors is not installed: compared with the slow definition only"
    pytest.importorskip("compressed_tensors", reason=reason)
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry(name)


def scheme_of(config: dict[str, Any]) -> Any:
    from compressed_tensors.quantization import QuantizationScheme

    return QuantizationScheme.model_validate(config["config_groups"]["group_0"])
