"""Calls of machine code one after another, without Python between them.

Each is a C function of one address. All threads of a team enter one that shares its work out, as
team.py has it. One thread enters any other, and the rest wait.
"""

from __future__ import annotations

from typing import NamedTuple

from numba import types

from moe_infinity.kernels.cpu.compiler import c_function, reader_of
from moe_infinity.kernels.cpu.team import LINE, call_at, fetch_add, wait_for

COUNTERS = 2 * LINE  # int64s of one call: how many threads have come, and whether it is done


class Turn(NamedTuple):
    """One call: integers, for numba."""

    function: int  # address
    argument: int  # address
    is_shared: int  # by all threads
    counters: int  # address; 0 when the calls begin


class Turns(NamedTuple):
    """All calls: integers, for numba."""

    first: int  # address of the first Turn
    num_turns: int
    yield_: int


_turn_at = reader_of(Turn)
_turns_at = reader_of(Turns)


@c_function(types.void(types.int64), "in_turn")
def in_turn(address: int) -> None:
    """Make the calls that are described at `address`."""
    turns = _turns_at(address)
    for i in range(turns.num_turns):
        turn = _turn_at(turns.first + i * 32)
        if turn.is_shared:
            call_at(turn.function, turn.argument)
        else:
            if fetch_add(turn.counters, 1) == 0:
                call_at(turn.function, turn.argument)
                fetch_add(turn.counters + 8 * LINE, 1)
            wait_for(turn.counters + 8 * LINE, 1, turns.yield_)
