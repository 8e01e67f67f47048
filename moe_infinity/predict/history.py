"""What a predictor learned, on disk: the collection of earlier requests, the tables, the weights.

A file belongs to one model, told by a signature, and to one version of the format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_infinity.errors import TraceError
from moe_infinity.predict.archive import DAMAGED, read_arrays, write_arrays
from moe_infinity.predict.eamc import Eamc
from moe_infinity.predict.predictor import Predictor

FORMAT_VERSION = 1
FOLLOW_TABLES = ("transitions", "layers")


def save_history(path: Path, predictor: Predictor, *, signature: str) -> None:
    """Raises TraceError, and leaves neither a partial file nor a changed old one."""
    arrays: dict[str, Any] = {
        "format_version": np.array(FORMAT_VERSION),
        "signature": np.array(signature),
        "weights": predictor.weights,
        "base": predictor.base_LE,
        "num_tokens": np.array(predictor.num_tokens),
        **predictor.tokens.arrays(),
        **predictor.eamc.arrays(),
    }
    for name in FOLLOW_TABLES:
        table = getattr(predictor, name)
        arrays |= {f"{name}_counts": table.counts, f"{name}_uses": table.uses}
    write_arrays(path, arrays, what="history")


def load_history(path: Path, predictor: Predictor, *, signature: str) -> None:
    """Let a fresh predictor go on from what was saved. Raises TraceError if the file is damaged, or
    of another format version or model.
    """
    try:
        arrays = read_arrays(path, expected={"format_version", "signature"})
        found = {name: arrays[name].tolist() for name in ("format_version", "signature")}
        wanted = {"format_version": FORMAT_VERSION, "signature": signature}
        for name, value in wanted.items():
            if found[name] != value:
                raise TraceError(
                    f"{path}: not a history of this model: {name} {found[name]!r}, "
                    f"expected {value!r}"
                )
        _restore(predictor, arrays)
    except TraceError:
        raise
    except (*DAMAGED, KeyError, TypeError) as error:
        raise TraceError(f"{path}: not a history: {error}") from error


def _restore(predictor: Predictor, arrays: dict[str, NDArray[Any]]) -> None:
    """Raises ValueError or KeyError for arrays that do not fit; some may have been taken then."""
    eamc = Eamc.from_arrays(arrays)
    base = arrays["base"]
    weights = arrays["weights"]
    shape_LE = (predictor.num_layers, predictor.num_experts)
    if base.shape != shape_LE or weights.shape != predictor.weights.shape:
        raise ValueError(f"base rates {base.shape} and weights {weights.shape}")
    if eamc.decode.shape[1:] != shape_LE:
        raise ValueError(f"requests of shape {eamc.decode.shape[1:]}, not {shape_LE}")
    numbers = [arrays[f"{name}_{part}"] for name in FOLLOW_TABLES for part in ("counts", "uses")]
    if not all(np.isfinite(n).all() and (n >= 0).all() for n in (*numbers, base)):
        raise ValueError("counts that are negative or no numbers")
    num_tokens = arrays["num_tokens"]
    ids = arrays["token_ids"].tolist()
    if not (np.isfinite(weights).all() and (base > 0).all() and num_tokens >= 0):
        raise ValueError("weights or rates no predictor has")
    if len(set(ids)) != len(ids):
        raise ValueError("a token id twice")
    for name in FOLLOW_TABLES:
        getattr(predictor, name).restore(arrays[f"{name}_counts"], arrays[f"{name}_uses"])
    predictor.tokens.restore(arrays)
    predictor.restore(eamc, base, weights, int(num_tokens))
