"""Sequences that wait for a seat, and whose turn it is: clients share the seats and the queue.

one client   may fill the queue and all seats while nobody else asks
another      gets a seat before the first gets one more, and one of the first's if it has two
             more: the first's newest sequence then waits, with what it has computed
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from secrets import token_bytes

from moe_infinity.server import limits
from moe_infinity.server.sequences import QueueFull, Running

FAIR = 1  # seats that a client may have more than another that waits


class Seats:
    """The places of sequences in steps, by which the recorder knows them."""

    def __init__(self, num_seats: int) -> None:
        self._num_seats = num_seats
        self._free = list(range(num_seats))[::-1]

    def __bool__(self) -> bool:
        """True if one is free."""
        return len(self._free) > 0

    def give(self, sequence: Running) -> None:
        sequence.seat = self._free.pop()

    def take_back(self, sequence: Running) -> None:
        """Does nothing if the sequence has none."""
        if sequence.seat is not None:
            self._free.append(sequence.seat)
            sequence.seat = None

    def check_invariants(self, seated: Sequence[Running]) -> None:
        """Assert that each seat is free or taken once."""
        taken = [sequence.seat for sequence in seated if sequence.seat is not None]
        assert sorted(taken + self._free) == list(range(self._num_seats)), (taken, self._free)


class SeatQueue:
    """The queue. Not safe to use from several threads at once."""

    def __init__(self, max_queue: int) -> None:
        """`max_queue`: sequences of one client."""
        self._max_queue = max_queue
        self._queues: dict[str, deque[Running]] = {}  # by client; who got a seat last is last
        self._salt = token_bytes()

    def __iter__(self) -> Iterator[Running]:
        return iter([sequence for queue in self._queues.values() for sequence in queue])

    def __len__(self) -> int:
        return sum(map(len, list(self._queues.values())))

    def by_client(self) -> dict[str, int]:
        """How many sequences of each client wait, by a name that tells neither its key nor its
        address.
        """
        return {self._hash(client): len(queue) for client, queue in list(self._queues.items())}

    def _hash(self, client: str) -> str:
        return blake2b(client.encode(), key=self._salt, digest_size=4).hexdigest()

    def add(self, sequences: Sequence[Running]) -> None:
        """Queue sequences of one client, all of them or none. Raises QueueFull."""
        if not sequences:
            return
        client = sequences[0].request.client
        own = self._queues.get(client, ())
        if len(own) + len(sequences) > self._max_queue:
            raise QueueFull(f"{len(own)} sequences are waiting")
        if len(self) + len(sequences) > self._max_queue * limits.CLIENTS.most:
            raise QueueFull(f"{len(self)} sequences of all clients are waiting")
        # Any request alone is taken, however long it is.
        new = num_tokens(sequences)
        if own and num_tokens(own) + new > limits.QUEUED_TOKENS_OF_ONE.most:
            raise QueueFull("long prompts are waiting")
        if len(self) and num_tokens(self) + new > limits.QUEUED_TOKENS.most:
            raise QueueFull("long prompts of other clients are waiting")
        has_images = len(self) > 0 and image_bytes(sequences) > 0
        if has_images and image_bytes((*self, *sequences)) > limits.QUEUED_IMAGES.most:
            raise QueueFull("large images are waiting")
        self._queues.setdefault(client, deque()).extend(sequences)

    def put_back(self, sequence: Running) -> None:
        """Queue a sequence that had a seat, before the others of its client."""
        self._queues.setdefault(sequence.request.client, deque()).appendleft(sequence)

    def next_client(self, seats: Counter[str]) -> str | None:
        """Return the client that waits and has the fewest seats; None if nobody waits."""
        return min(self._queues, key=lambda client: seats[client], default=None)

    def pop(self, client: str) -> Running:
        """Take a client's first sequence out of the queue, for a seat."""
        queue = self._queues.pop(client)
        sequence = queue.popleft()
        if queue:
            self._queues[client] = queue  # behind the others
        return sequence

    def remove(self, sequence: Running) -> None:
        """Take a sequence out of the queue, if it is there."""
        client = sequence.request.client
        queue = self._queues.get(client, deque())
        if sequence in queue:
            queue.remove(sequence)
        if not queue:
            self._queues.pop(client, None)

    def clear(self) -> None:
        self._queues.clear()


class PromptShares:
    """Tokens of prompts that were computed for each client: whoever will have had fewest comes
    next, so that a short prompt waits for no long ones of other clients (fair queueing: Demers,
    Keshav and Shenker, SIGCOMM 1989).
    """

    def __init__(self, chunk: int) -> None:
        """`chunk`: tokens of a prompt that a step computes, about."""
        self._chunk = chunk
        self._num_computed: Counter[str] = Counter()
        self._present: set[str] = set()  # clients that had prompts last time

    def next_of(self, sequences: Sequence[Running]) -> Running:
        """Return the oldest sequence of the client whose turn it is."""
        clients = {sequence.request.client for sequence in sequences}
        least = min((self._num_computed[each] for each in clients & self._present), default=0)
        # Who comes is as far as who is least far, at least: nobody has saved up turns.
        known = {each: num for each, num in self._num_computed.items() if num > least}
        new = dict.fromkeys(clients, least)
        self._num_computed = Counter(new | known)
        self._present = clients
        oldest: dict[str, Running] = {}
        for sequence in sequences:
            oldest.setdefault(sequence.request.client, sequence)
        return min(oldest.values(), key=self._num_behind_next)

    def _num_behind_next(self, sequence: Running) -> int:
        """Tokens of its client once the next chunk is computed."""
        return self._num_computed[sequence.request.client] + min(num_left_of(sequence), self._chunk)

    def note(self, sequence: Running, num_tokens: int) -> None:
        """Take note of what was computed for a sequence."""
        self._num_computed[sequence.request.client] += num_tokens


def num_left_of(sequence: Running) -> int:
    """Tokens of a prompt that are still to be read."""
    return len(sequence.ids) - sequence.num_prefilled


def num_tokens(sequences: Iterator[Running] | Sequence[Running] | SeatQueue) -> int:
    """Return the tokens of their prompts, together."""
    return sum(len(sequence.ids) for sequence in sequences)


def image_bytes(sequences: Iterable[Running]) -> int:
    """Memory of the images of prompts; choices of one prompt share them."""
    images = {each.request.images for each in sequences}
    return sum(each.num_bytes for each in images if each is not None)


def to_yield(seated: Sequence[Running], client: str) -> Running | None:
    """Return the sequence whose seat a client gets that has to wait else; None if it has to.

    `seated`: in the order in which they got their seats.
    """
    seats = Counter(sequence.request.client for sequence in seated)
    greediest = max(seats, key=lambda each: seats[each], default=client)
    if seats[greediest] - seats[client] <= FAIR:
        return None
    return next(each for each in reversed(seated) if each.request.client == greediest)
