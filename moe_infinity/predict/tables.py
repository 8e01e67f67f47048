"""Counts learned from earlier tokens: the experts that follow each expert, and the experts of each
token id. Learned online; old evidence fades because full counters are halved.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_infinity.experts import Ints

Floats = NDArray[np.float32]

# A probability is (count + PRIOR * base rate) / (number + PRIOR). Halved or doubled it moves the
# hit rate by 0.06 points at most (docs/experiments.md, four requests).
PRIOR = 2.0
FULL = 512  # uses of an expert after which its counts are halved
TOKEN_FULL = 254  # the same for a token id: its counts are bytes
TOKEN_TABLE_BYTES = 64 << 20  # of each of the two tables
MAX_TOKENS = 1 << 16  # token ids kept at most, however small the model


class FollowTable:
    """Counts, for an expert of one layer, how often each expert of a layer followed it."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.counts = np.zeros((num_layers, num_experts, num_experts), dtype=np.float32)
        self.uses = np.zeros((num_layers, num_experts), dtype=np.float32)
        self._trust = 1 / (self.uses + np.float32(PRIOR))  # what one count is worth
        self._ones = np.ones(num_experts, dtype=np.float32)

    def learn(self, before_LK: Ints, after_LK: Ints, *, first_layer: int = 0) -> None:
        """Learn one pair of routings for each layer from `first_layer` on: distinct experts, and
        those that followed.
        """
        layers_L = np.arange(first_layer, first_layer + len(before_LK))
        self.counts[layers_L[:, None, None], before_LK[:, :, None], after_LK[:, None, :]] += 1
        self.uses[layers_L[:, None], before_LK] += 1
        self._trust = 1 / (self.uses + np.float32(PRIOR))

    def restore(self, counts: NDArray[Any], uses: NDArray[Any]) -> None:
        """Take up what another table had. Raises ValueError for arrays of another shape."""
        if (counts.shape, uses.shape) != (self.counts.shape, self.uses.shape):
            raise ValueError(f"counts {counts.shape} and uses {uses.shape}")
        self.counts[:] = counts
        self.uses[:] = uses
        self._trust = 1 / (self.uses + np.float32(PRIOR))

    def forget(self) -> None:
        """Halve what is full."""
        full = self.uses > FULL
        if full.any():
            self.counts[full] /= 2
            self.uses[full] /= 2
            self._trust = 1 / (self.uses + np.float32(PRIOR))

    def probabilities(
        self, moe_layer_idx: int, experts_K: Ints, base_E: Floats, out_E: Floats
    ) -> None:
        """The mean over the K experts of what followed each, mixed with the base rate."""
        num = len(experts_K)
        trust_K = self._trust[moe_layer_idx].take(experts_K)
        np.multiply(base_E, PRIOR / num * float(trust_K.dot(self._ones[:num])), out=out_E)
        trust_K /= num
        out_E += trust_K.dot(self.counts[moe_layer_idx].take(experts_K, axis=0))


class TokenTable:
    """Counts, for a token id, how often each expert served it, and how often each served the token
    after it. Keeps the ids used last.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        capacity = min(max(TOKEN_TABLE_BYTES // (num_layers * num_experts), 1), MAX_TOKENS)
        shape = (2, capacity, num_layers, num_experts)  # 0: the token itself, 1: the one after it
        self.counts = np.zeros(shape, dtype=np.uint8)  # touched pages only: zeros are lazy
        self.uses = np.zeros((2, capacity), dtype=np.uint8)
        self._slots: OrderedDict[int, int] = OrderedDict()
        self._layers_L1 = np.arange(num_layers)[:, None]

    def learn(self, token_id: int, experts_LK: Ints, *, after: bool) -> None:
        """The token, or the token after it, went to these experts."""
        if token_id < 0:
            return
        slot = self._slot_of(token_id)
        if self.uses[int(after), slot] >= TOKEN_FULL:
            self.counts[int(after), slot] //= 2
            self.uses[int(after), slot] //= 2
        self.counts[int(after), slot, self._layers_L1, experts_LK] += 1
        self.uses[int(after), slot] += 1

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of the table, the id used longest ago first."""
        slots = list(self._slots.values())
        return {
            "token_ids": np.array(list(self._slots), dtype=np.int64),
            "token_counts": self.counts[:, slots],
            "token_uses": self.uses[:, slots],
        }

    def restore(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take up what `arrays()` gave, as much of the newest as there is room for. Raises
        ValueError for arrays of another shape.
        """
        ids, counts, uses = (arrays[f"token_{name}"] for name in ("ids", "counts", "uses"))
        num = len(ids) if ids.ndim == 1 else -1
        if (counts.shape, uses.shape) != ((2, num, *self.counts.shape[2:]), (2, num)):
            raise ValueError(f"token tables of shapes {ids.shape}, {counts.shape}, {uses.shape}")
        first = max(num - self.uses.shape[1], 0)
        self._slots = OrderedDict((int(t), slot) for slot, t in enumerate(ids[first:]))
        self.counts[:, : num - first] = counts[:, first:]
        self.uses[:, : num - first] = uses[:, first:]

    def evidence(
        self, token_id: int, *, after: bool, base_LE: Floats, log_base_LE: Floats
    ) -> Floats | None:
        """[L, E]: log of how much likelier than its base rate each expert is; None if unknown."""
        slot = self._slots.get(token_id)
        if slot is None or self.uses[int(after), slot] == 0:
            return None
        seen_LE: Floats = base_LE * np.float32(PRIOR)
        seen_LE += self.counts[int(after), slot]
        np.log(seen_LE, out=seen_LE)
        seen_LE -= log_base_LE
        seen_LE -= np.log(self.uses[int(after), slot] + np.float32(PRIOR))
        return seen_LE

    def _slot_of(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        if slot is None:
            if len(self._slots) < self.uses.shape[1]:
                slot = len(self._slots)
            else:
                _, slot = self._slots.popitem(last=False)
                self.counts[:, slot] = self.uses[:, slot] = 0
            self._slots[token_id] = slot
        else:
            self._slots.move_to_end(token_id)
        return slot
