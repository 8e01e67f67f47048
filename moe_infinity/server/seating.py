"""Who has a seat and who waits for one.

A sequence that waits gets a seat when one is free and memory has room for it. It may have to give
its seat up: to a client that has fewer, or because its prompt or its next tokens have no room in
memory beside the others.
"""

from __future__ import annotations

import threading
import time
from collections import Counter

from moe_infinity.server.decoding import Decoding
from moe_infinity.server.passes import Passes
from moe_infinity.server.reading import Reading
from moe_infinity.server.sequences import Running
from moe_infinity.server.turns import SeatQueue, Seats, to_yield


class Seating:
    """Moves sequences between the queue and those that are read or decode. For one thread."""

    def __init__(
        self,
        waiting: SeatQueue,
        changed: threading.Condition,
        prefilling: Reading,
        decoding: Decoding,
        passes: Passes,
    ) -> None:
        """`waiting` is guarded by `changed`, because requests come in any thread."""
        self._waiting = waiting
        self._changed = changed
        self._prefilling = prefilling
        self._decoding = decoding
        self._passes = passes
        self._free_seats = Seats(passes.num_seats)

    def everyone(self) -> list[Running]:
        """All sequences, those that wait first."""
        with self._changed:
            return [*self._waiting, *self._prefilling, *self._decoding]

    def admit(self) -> None:
        """Give seats to those that wait, as far as there are seats and memory."""
        while True:
            with self._changed:  # not longer: requests come meanwhile
                seated = (*self._prefilling, *self._decoding)
                client = self._waiting.next_client(Counter(s.request.client for s in seated))
            if client is None:
                return
            yielding = None if self._free_seats else self._to_yield(client)
            if not self._free_seats and yielding is None:
                return
            with self._changed:
                sequence = self._waiting.pop(client)
            try:
                can_hold = self._passes.can_hold(sequence, seated, self._decoding.num_held)
                if can_hold and yielding is not None:
                    self._let_yield(yielding)
            except BaseException:
                self._put_back(sequence)  # else nobody would end it
                raise
            if not can_hold:
                self._put_back(sequence)
                return
            self._free_seats.give(sequence)
            sequence.began = min(sequence.began, time.monotonic())
            if sequence.is_set_aside:
                sequence.is_set_aside = False
                self._decoding.add(sequence)
            else:
                self._prefilling.add(sequence)

    def _to_yield(self, client: str) -> Running | None:
        """A sequence of a client that has more than its share, if there is one."""
        seated = sorted((*self._decoding, *self._prefilling), key=lambda each: each.began)
        return to_yield([s for s in seated if s not in self._prefilling.under_way], client)

    def _let_yield(self, sequence: Running) -> None:
        """Let a sequence wait, and free its seat."""
        if sequence in self._decoding:
            self._decoding.set_aside(sequence)
            sequence.is_set_aside = True
        else:
            self._prefilling.remove(sequence)
        self._put_back(sequence)

    def let_wait_for_room(self, sequence: Running) -> bool:
        """Let a sequence wait, without its cache, until others have left it memory. False if there
        are no others, or part of what it needs is not kept.
        """
        request = sequence.request
        is_alone = len(self._prefilling) + len(self._decoding) == 1
        if is_alone or request.reads_all or (request.images is not None and sequence.has_answer):
            return False
        group = self._decoding if sequence in self._decoding else self._prefilling
        group.remove(sequence)
        sequence.begin_anew(len(sequence.ids) - sequence.num_forgotten)
        self._put_back(sequence)
        return True

    def _put_back(self, sequence: Running) -> None:
        """Queue a sequence before the others of its client, without a seat."""
        self._free_seats.take_back(sequence)
        sequence.is_known = False
        with self._changed:
            self._waiting.put_back(sequence)

    def remove(self, sequence: Running) -> None:
        """Remove a sequence in any state, and free its seat and its cache."""
        with self._changed:
            self._waiting.remove(sequence)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        if sequence in self._decoding:
            self._decoding.remove(sequence)
        self._free_seats.take_back(sequence)
        sequence.cache = None

    def clear(self) -> list[Running]:
        """Remove all, whatever state they are in, and return them."""
        with self._changed:  # once: who comes in between would be lost
            everyone = self.everyone()
            self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._free_seats = Seats(self._passes.num_seats)
        return everyone

    def check_invariants(self) -> None:
        """Assert that each seat is free or taken once."""
        self._free_seats.check_invariants([*self._prefilling, *self._decoding])
