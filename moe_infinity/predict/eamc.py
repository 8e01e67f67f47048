"""Expert Activation Matrices, the EAM Collection of past requests, and how like them a running one
is (arXiv 2401.14361v3 §4.3-4.5, B.1).

An EAM counts the tokens of one request that each expert served. It has a row for each MoE layer;
for n tokens and top-k routing every row sums to n * k. Prefill and decode are counted apart: a
prompt activates nearly every expert, while decoding repeats a few.

    finished request --add--> Eamc --EamcMatch--> nearest stored requests --> layers still to come

Each row of a stored matrix sums to 1, so a long request counts as much as a short one. Only layers
that the query has are compared: one that has not run yet says nothing about likeness. No torch: the
engine and the simulator run this same code. Shapes: P stored requests, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_infinity.errors import ConfigError
from moe_infinity.experts import Ints, Phase

TINY = np.finfo(np.float64).tiny  # squared norms start from it: 0 / sqrt(TINY) is 0, 0 / 0 is not

Doubles = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RequestEam:
    """The two matrices of one request, each [MoE layers, experts]."""

    prefill: Ints
    decode: Ints

    def of(self, phase: Phase) -> Ints:
        return self.prefill if phase is Phase.PREFILL else self.decode


def row_normalised(matrix_LE: NDArray[Any]) -> Doubles:
    """Each row divided by its sum; empty rows stay zero."""
    sums_L1 = matrix_LE.sum(axis=-1, keepdims=True, dtype=np.float64)
    normalised_LE: Doubles = matrix_LE / np.where(sums_L1 > 0, sums_L1, 1.0)
    return normalised_LE


class Eamc:
    """Past requests' EAMs, kept for matching; at most `capacity` of them. Raises ConfigError."""

    def __init__(self, capacity: int, num_layers: int, num_experts: int) -> None:
        if capacity < 1:
            raise ConfigError(f"the capacity of an EAMC must be at least 1, got {capacity}")
        self.capacity = capacity
        self.num_stored = 0  # P: the first P of the indices below are in use
        self.version = 0  # grows with each stored request
        # A cell's values of all stored lie side by side: one observed expert is one vector add.
        shape_LEP = (num_layers, num_experts, capacity)
        self.cells = {phase: np.zeros(shape_LEP, dtype=np.float32) for phase in Phase}
        self.squares = {phase: np.zeros((num_layers, capacity)) for phase in Phase}  # of row norms
        self.decode = np.zeros((capacity, num_layers, num_experts), dtype=np.float32)
        self._mean_LE: Doubles | None = None

    @property
    def norms(self) -> Doubles:
        """[P] Euclidean norms of the flattened stored decode matrices."""
        norms_P: Doubles = np.sqrt(self.squares[Phase.DECODE][:, : self.num_stored].sum(axis=0))
        return norms_P

    def add(self, eam: RequestEam) -> int | None:
        """Store a finished request and return its index. When full it replaces the stored one whose
        decode matrix is most similar (v3 B.1, Fig 10): the newest is kept, and so is diversity.
        A request without a decode token is not stored: None.
        """
        if not eam.decode.any():
            return None
        matrices = {phase: row_normalised(eam.of(phase)).astype(np.float32) for phase in Phase}
        idx = self.num_stored
        if idx == self.capacity:
            dots_P = self.decode.reshape(idx, -1) @ matrices[Phase.DECODE].reshape(-1)
            idx = int((dots_P / self.norms).argmax())
        self._store(idx, matrices)
        return idx

    def _store(self, idx: int, matrices: Mapping[Phase, NDArray[np.float32]]) -> None:
        for phase, matrix_LE in matrices.items():
            self.cells[phase][:, :, idx] = matrix_LE
            self.squares[phase][:, idx] = np.square(matrix_LE, dtype=np.float64).sum(axis=1)
        self.decode[idx] = matrices[Phase.DECODE]
        self.num_stored = max(self.num_stored, idx + 1)
        self.version += 1
        self._mean_LE = None

    def decode_matrix(self, idx: int) -> NDArray[np.float32]:
        """[L, E], each row summing to 1 or 0. A view: it changes when this one is replaced."""
        assert 0 <= idx < self.num_stored, idx
        matrix_LE: NDArray[np.float32] = self.decode[idx]
        return matrix_LE

    def mean_decode(self) -> Doubles:
        """[L, E] mean of all stored decode matrices, each row normalised; zeros when empty."""
        if self._mean_LE is None:
            self._mean_LE = row_normalised(self.decode[: self.num_stored].sum(0, dtype=np.float64))
        return np.array(self._mean_LE)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays that a file keeps: prefill and decode as float32 [P, L, E]."""
        stored_LEP = {ph.value: of[:, :, : self.num_stored] for ph, of in self.cells.items()}
        return {name: of.transpose(2, 0, 1) for name, of in stored_LEP.items()}

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Store what `arrays()` gave; `arrays` may have others, too. Raises ValueError for arrays
        of another shape, or of more requests than there is room for.
        """
        stored_PLE = {phase: arrays[phase.value] for phase in Phase}
        num_stored = len(arrays[Phase.DECODE.value])
        shape = (num_stored, *self.decode.shape[1:])
        if num_stored > self.capacity or any(of.shape != shape for of in stored_PLE.values()):
            raise ValueError(f"requests of shapes {[of.shape for of in stored_PLE.values()]}")
        for idx in range(num_stored):
            self._store(idx, {phase: of[idx] for phase, of in stored_PLE.items()})


class EamcMatch:
    """One running request, or one step of it, compared with all stored ones (v3 §4.5).

    The query is compared with the stored matrices of `phase`; what is predicted is decoding.
    """

    def __init__(self, eamc: Eamc, phase: Phase = Phase.DECODE) -> None:
        self._eamc = eamc
        self._cells_LEP = eamc.cells[phase]
        self._squares_LP = eamc.squares[phase]
        self._query_LE = np.zeros(self._cells_LEP.shape[:2])
        self._flat_query = self._query_LE.reshape(-1)  # a view
        self._dots_P = np.zeros(eamc.capacity)
        self._observed_squares_P = np.zeros(eamc.capacity)
        self.begin()

    def begin(self) -> None:
        """Forget the query."""
        self._query_LE.fill(0)
        self._dots_P.fill(0)
        self._observed_squares_P.fill(TINY)
        self._is_observed_L = [False] * len(self._query_LE)
        self._similarities_P: Doubles | None = None
        self._version = self._eamc.version

    def observe(
        self, moe_layer_idx: int, experts: Ints | Sequence[int], counts: Ints | int = 1
    ) -> None:
        """Distinct experts of one layer, and how many tokens (at least 1) each served.
        O(capacity x experts), whatever the number of layers.
        """
        if len(experts) == 0:
            return
        cells_KP = self._cells_LEP[moe_layer_idx].take(experts, 0)
        if isinstance(counts, int) and counts == 1:  # as nearly always when decoding
            self._dots_P += np.add.reduce(cells_KP, 0)
        else:
            self._dots_P += np.full(len(experts), counts, np.float32) @ cells_KP
        row_E = self._query_LE[moe_layer_idx]
        row_E[experts] += counts
        if not self._is_observed_L[moe_layer_idx]:
            self._is_observed_L[moe_layer_idx] = True
            self._observed_squares_P += self._squares_LP[moe_layer_idx]
        self._similarities_P = None

    def observe_all(self, experts_LK: Ints) -> None:
        """One token in all layers at once; as `observe` layer by layer, 20 times faster for 26."""
        num_layers, num_experts = self._query_LE.shape
        cells = (experts_LK + np.arange(0, num_layers * num_experts, num_experts)[:, None]).ravel()
        flat_cells = self._cells_LEP.reshape(num_layers * num_experts, -1)
        self._dots_P += np.add.reduce(flat_cells.take(cells, 0), 0)
        self._flat_query[cells] += 1
        if not all(self._is_observed_L):
            new = np.logical_not(self._is_observed_L)
            self._observed_squares_P += self._squares_LP[new].sum(axis=0)
            self._is_observed_L = [True] * num_layers
        self._similarities_P = None

    @property
    def dots(self) -> Doubles:
        """[P] dot products of the query's counts and the stored. A view that `observe` updates."""
        self._compare_again_if_changed()
        return self._dots_P[: self._eamc.num_stored]

    def similarities(self) -> Doubles:
        """[P]: the cosines of the query and each stored request, over the layers observed. Zeros if
        nothing was observed. Read only: all callers share it until the next `observe`.
        """
        self._compare_again_if_changed()
        if self._similarities_P is None:
            squared_norm = self._flat_query.dot(self._flat_query) or 1.0  # 1: nothing observed
            squares_P = self._observed_squares_P * squared_norm
            cosines_P = self._dots_P / np.sqrt(squares_P, squares_P)
            self._similarities_P = cosines_P[: self._eamc.num_stored]
        return self._similarities_P

    def nearest(self, num: int) -> NDArray[np.intp]:
        """Indices of the `num` (or all) most similar, best first; of equals the lower index."""
        return np.argsort(-self.similarities(), kind="stable")[:num]

    def predict(self, num_nearest: int) -> Doubles:
        """[L, E] sum of the nearest decode matrices, each row normalised; empty rows zero. The mean
        of all stored while the query is like none; zeros when nothing is stored.
        """
        nearest_N = self.nearest(num_nearest)
        if not self.similarities()[nearest_N].any():
            return self._eamc.mean_decode()
        return row_normalised(np.add.reduce(self._eamc.decode.take(nearest_N, 0), 0))

    def _compare_again_if_changed(self) -> None:
        """Compare afresh when a request was added since the last look."""
        if self._version != self._eamc.version:
            counted_LE = self._query_LE > 0
            self._dots_P[:] = self._query_LE[counted_LE] @ self._cells_LEP[counted_LE]
            self._observed_squares_P[:] = TINY + self._squares_LP[self._is_observed_L].sum(axis=0)
            self._similarities_P = None
            self._version = self._eamc.version
