"""The knowledge of a predictor on disk: the collection of earlier requests, the tables, the
weights.

A file belongs to one model, known by a signature, and to one version of the format. The checksums
of the .npz find damage. Beyond that only shapes are checked: values are those that a predictor
wrote.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_infinity.errors import TraceError
from moe_infinity.output import DAMAGED, read_arrays, why_unwritable, write_arrays
from moe_infinity.predict.eamc import RequestEam
from moe_infinity.predict.predictor import Predictor

FORMAT_VERSION = 1
FOLLOW_TABLES = ("transitions", "layers")


class History:
    """The file in which one model's predictor keeps what it learned, if there is to be one."""

    def __init__(self, path: str | Path | None, signature: str) -> None:
        """`signature` tells this model from others; None for `path`: nothing is kept."""
        self._path = None if path is None else Path(path)
        self._signature = signature

    def load(self, predictor: Predictor | None) -> None:
        """Let a fresh predictor go on from what earlier runs learned. Raises TraceError, also if
        nothing could be written at the end.
        """
        if self._path is None or predictor is None:
            return
        check_place(self._path)
        if self._path.exists():
            load_history(self._path, predictor, signature=self._signature)

    def save(self, predictor: Predictor | None, last_eams: list[RequestEam]) -> None:
        """Write what was learned, with the last requests. Raises TraceError."""
        if self._path is not None and predictor is not None:
            predictor.finish(last_eams)
            save_history(self._path, predictor, signature=self._signature)


def check_place(path: Path) -> None:
    """Raises TraceError if no history can be written there."""
    if reason := why_unwritable(path):
        raise TraceError(f"{path}: the history could not be written: {reason}")


def save_history(path: Path, predictor: Predictor, *, signature: str) -> None:
    """Write what a predictor learned. Raises TraceError, and leaves neither a partial file nor a
    changed old one.
    """
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
        wanted = {"format_version": FORMAT_VERSION, "signature": signature}
        for name, value in wanted.items():
            found = arrays[name].tolist()
            if found != value:
                raise TraceError(
                    f"{path}: not a history of this model: {name} {found!r}, expected {value!r}"
                )
        _restore(predictor, arrays)
    except TraceError:
        raise
    except (*DAMAGED, KeyError, TypeError) as error:
        raise TraceError(f"{path}: not a history: {error}") from error


def _restore(predictor: Predictor, arrays: dict[str, NDArray[Any]]) -> None:
    """Restore a predictor. Raises ValueError or KeyError for arrays that do not fit; some may have
    been taken then.
    """
    predictor.eamc.restore(arrays)
    for name in FOLLOW_TABLES:
        getattr(predictor, name).restore(arrays[f"{name}_counts"], arrays[f"{name}_uses"])
    predictor.tokens.restore(arrays)
    predictor.restore(arrays["base"], arrays["weights"], int(arrays["num_tokens"]))
