"""Which files of a prompt store are of use for a prompt, beside what is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moe_infinity.prefixes.prefix_tree import BLOCK, Node, Tokens, name_below, up_to_state
from moe_infinity.prefixes.prompt_store import PromptStore


class Absent(NamedTuple):
    """A block that is not in memory."""

    name: str
    tokens: Tokens


class Wanted(NamedTuple):
    """Blocks that continue so many whole ones in memory, and the state behind them."""

    num_whole: int
    blocks: list[Absent]
    state: str | None  # the name of its block; None: the model has no states
    known: int  # tokens that need no file

    @property
    def end(self) -> int:
        """Tokens up to the end of the last block."""
        return self.num_whole * BLOCK + sum(len(absent.tokens) for absent in self.blocks)

    def files(self) -> list[str]:
        """The names of their files. The state comes first: without it the others are no use."""
        states = [] if self.state is None else [f"{self.state}.state"]
        return [*states, *(f"{absent.name}.block" for absent in self.blocks)]


def wanted_of(
    store: PromptStore,
    path: list[Node],
    token_ids: Sequence[int],
    *,
    has_states: bool,
    most_bytes: int,
) -> Wanted:
    """Return what to read behind a path of blocks in memory; no files if nothing would be won. With
    states it leads to the last one that the store has.
    """
    in_memory = len(path) - 1
    names = [node.name for node in path]
    room = most_bytes
    while (start := (len(names) - 1) * BLOCK) + BLOCK <= len(token_ids):
        name = name_below(names[-1], token_ids[start : start + BLOCK])
        size = store.size(f"{name}.block")
        if size is None or size > room:
            break
        room -= size
        names.append(name)
    whole = [
        Absent(names[at + 1], tuple(token_ids[at * BLOCK : (at + 1) * BLOCK]))
        for at in range(len(names) - 1)
    ]
    if not has_states:
        return Wanted(in_memory, whole[in_memory:], None, in_memory * BLOCK)
    known = _known_tokens(path, token_ids)
    found = _last_state(store, names, token_ids, known)
    if found is None:
        return Wanted(in_memory, [], None, known)
    num_whole, short = found
    blocks = [*whole[in_memory:num_whole], *([] if short is None else [short])]
    state = names[num_whole] if short is None else short.name
    return Wanted(min(in_memory, num_whole), blocks, state, known)


def _known_tokens(path: list[Node], token_ids: Sequence[int]) -> int:
    """Tokens up to the last state in memory."""
    path, short = up_to_state(path, token_ids)
    return (len(path) - 1) * BLOCK + (0 if short is None else len(short.tokens))


def _last_state(
    store: PromptStore, names: list[str], token_ids: Sequence[int], known: int
) -> tuple[int, Absent | None] | None:
    """How many whole blocks lead to the last state that the store has, and the shorter block behind
    them; None if memory has one that is no worse.
    """
    for num_whole in range(len(names) - 1, -1, -1):
        start = num_whole * BLOCK
        for end in range(min(start + BLOCK - 1, len(token_ids)), start, -1):
            if end <= known:
                return None
            tokens = tuple(token_ids[start:end])
            name = name_below(names[num_whole], tokens)
            if store.size(f"{name}.state") is not None:
                return num_whole, Absent(name, tokens)
        if start <= known:
            return None
        if store.size(f"{names[num_whole]}.state") is not None:
            return num_whole, None
    return None
