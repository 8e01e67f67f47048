"""The sequences that decode. Those whose lengths a model computes alike share a batch."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from moe_infinity.errors import CheckpointError
from moe_infinity.memory.room import DECODE_STEPS
from moe_infinity.server.batch import DecodeBatch
from moe_infinity.server.passes import Passes
from moe_infinity.server.sequences import Running

Computed = tuple[Running, Tensor | Exception]  # logits [V] of the next token, or what failed


@dataclass(eq=False, slots=True)
class Group:
    """Sequences in the order of their rows."""

    key: Hashable
    batch: DecodeBatch = field(default_factory=DecodeBatch)
    sequences: list[Running] = field(default_factory=list)
    error: Exception | None = None  # if the batch is lost: its sequences fail in the next step

    def keep(self, sequences: Sequence[Running]) -> None:
        """Drop the rows of all others."""
        if self.error is None:
            self.batch.keep([self.sequences.index(sequence) for sequence in sequences])
        self.sequences = list(sequences)


class Decoding:
    """Computes their next tokens."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._groups: list[Group] = []
        self.ran_at = -math.inf  # when the last step ended, by time.monotonic()
        self.longest_gap_s = 0.0  # from one step to the next, if a sequence was in both
        self._num_looks = 0
        self._in_last_step: set[Running] = set()

    def __iter__(self) -> Iterator[Running]:
        return iter([sequence for group in self._groups for sequence in group.sequences])

    def __len__(self) -> int:
        return sum(len(group.sequences) for group in self._groups)

    @property
    def num_held(self) -> int:
        """Tokens in the KV caches, padding included."""
        return sum(group.batch.longest * len(group.sequences) for group in self._groups)

    @property
    def num_bytes(self) -> int:
        """Memory of the KV caches."""
        return sum(group.batch.num_bytes for group in self._groups)

    def add(self, sequence: Running) -> None:
        """Add a sequence whose cache has all tokens but the newest. The batch takes the cache."""
        assert sequence.cache is not None
        group = self._group_for(sequence)
        length = len(sequence.ids) - 1
        try:
            self._passes.room.make_for_keys(group.batch.num_to_join(length))
            group.batch.join(sequence.cache, length)
        except Exception as error:  # it may be joined in some layers
            group.batch = DecodeBatch()
            group.error = error
        group.sequences.append(sequence)
        sequence.cache = None

    def remove(self, sequence: Running, *, is_end: bool = False) -> None:
        """Free the memory of a sequence; with `is_end` the prefix cache may keep its answer."""
        group = next(group for group in self._groups if sequence in group.sequences)
        if is_end and group.error is None:
            row = group.sequences.index(sequence)
            self._passes.keep_answer(sequence, group.batch, row, is_end=True)
        group.keep([other for other in group.sequences if other is not sequence])
        if not group.sequences:
            self._groups.remove(group)

    def set_aside(self, sequence: Running) -> None:
        """Remove a sequence that gets its cache back, to be added again later."""
        group = next(group for group in self._groups if sequence in group.sequences)
        self._passes.room.make_for_keys(group.batch.longest)
        sequence.cache = group.batch.copy_of(group.sequences.index(sequence)).cache
        self.remove(sequence)

    def clear(self) -> None:
        """Remove all."""
        self._groups.clear()

    def step(self) -> list[Computed]:
        """Compute one token of each sequence.

        An expert that cannot be read fails the sequences that need it. Any other error of a forward
        pass fails all of its batch. Those that fail are removed.
        """
        self._regroup()
        sequences = list(self)
        computed = [each for group in list(self._groups) for each in self._compute(group)]
        now = time.monotonic()
        if not self._in_last_step.isdisjoint(sequences):
            self.longest_gap_s = max(self.longest_gap_s, now - self.ran_at)
        self._in_last_step = set(sequences)
        self.ran_at = now
        return computed

    @property
    def has_room(self) -> bool:
        """True if memory has room for the next tokens of all."""
        return self._passes.room.has_room(len(self) * DECODE_STEPS)

    def newest_without_room(self) -> Running | None:
        """The sequence that began last, if memory has no room for the next tokens of all."""
        self._num_looks = (self._num_looks + 1) % DECODE_STEPS
        if self._num_looks or not len(self) or self.has_room:
            return None
        return max(self, key=lambda sequence: sequence.began)

    def _regroup(self) -> None:
        """Move sequences that have grown out of their group."""
        for group in [each for each in self._groups if each.error is None]:
            keys = {self._key_of(sequence) for sequence in group.sequences}
            if len(keys) == 1 and all(other.key not in keys for other in self._groups):
                group.key = keys.pop()
            for sequence in list(group.sequences):
                if self._key_of(sequence) != group.key:
                    self.set_aside(sequence)
                    self.add(sequence)

    def _key_of(self, sequence: Running) -> Hashable:
        return self._passes.lengths.group(len(sequence.ids))

    def _group_for(self, sequence: Running) -> Group:
        key = self._key_of(sequence)
        for group in self._groups:
            if group.key == key:
                return group
        self._groups.append(Group(key))
        return self._groups[-1]

    def _compute(self, group: Group) -> list[Computed]:
        if group.error is not None:
            self._groups.remove(group)
            return [(sequence, group.error) for sequence in group.sequences]
        try:
            logits_BV = self._passes.decode(group.sequences, group.batch)
        except Exception as error:
            if isinstance(error, CheckpointError) and len(group.sequences) > 1:
                return self._compute_apart(group)
            self._groups.remove(group)
            return [(sequence, error) for sequence in group.sequences]
        return list(zip(group.sequences, logits_BV, strict=True))

    def _compute_apart(self, group: Group) -> list[Computed]:
        """Compute each sequence alone. Those that do not fail are together again for the next
        step.
        """
        group.batch.undo()
        together = Group(group.key)
        computed: list[Computed] = []
        for row, sequence in enumerate(group.sequences):
            alone = group.batch.copy_of(row)
            try:
                computed.append((sequence, self._passes.decode([sequence], alone)[0]))
            except Exception as error:
                computed.append((sequence, error))
                continue
            assert alone.cache is not None
            together.batch.join(alone.cache, alone.longest)
            together.sequences.append(sequence)
        self._groups.remove(group)
        if together.sequences:
            self._groups.append(together)
        return computed

    def check_invariants(self) -> None:
        """Assert that each sequence has a row."""
        for group in self._groups:
            num_rows = len(group.sequences) if group.error is not None else len(group.batch)
            assert num_rows == len(group.sequences) > 0, (group.batch, group.sequences)
