"""The blocks and states of prompts and answers in a tree; prefix_cache.py says what it is for.

Legend: L MoE layers, K experts of a token, T tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from moe_infinity.experts import Ints
from moe_infinity.prefixes.prompt_store import Kept

BLOCK = 16  # tokens
# A block counts as this much however small its keys and values are: its tokens and its node take
# about as much. So a number of bytes bounds the number of blocks in any case.
LEAST_BLOCK_BYTES = 512
Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class State:
    """The state of a model with recurrent layers, of all tokens up to the end of a block."""

    node: Node
    data: Tensor | None  # uint8; None: it was dropped
    experts: None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self.data is None else max(self.data.nbytes, LEAST_BLOCK_BYTES)


@dataclass(eq=False, slots=True)
class Node:
    """A block, or the root of an owner's blocks."""

    above: Node | None
    tokens: Tokens
    name: str  # tells its tokens and all above them, and their owner, from all others
    data: Tensor | None = None  # uint8; None: it is a root, or was dropped
    experts: Ints | None = None  # uint16 [T, L, K]; None: not known
    state: State | None = None
    below: dict[Tokens, Node] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return 0 if self.data is None else max(self.data.nbytes, LEAST_BLOCK_BYTES)

    @property
    def is_kept(self) -> bool:
        return self.data is not None or self.above is None


def name_below(above: str, tokens: Sequence[int]) -> str:
    """The name of the block of these tokens below another. No two have the same."""
    text = f"{above} {','.join(map(str, tokens))}"
    return hashlib.sha256(text.encode()).hexdigest()[:40]


class Branch:
    """The blocks of one sequence, as it grows."""

    def __init__(self, root: Node) -> None:
        self.node = root  # the last whole block that the tree has
        self.num_tokens = 0  # up to its end
        self.state_end = 0  # tokens up to the last state that was kept or found
        self.fork = 0  # up to here, other sequences have had the same tokens
        self.experts: list[Ints] = []  # of the tokens behind the node, [T, L, K] each
        self.has_experts = True

    def note(self, experts_TLK: Ints | None) -> None:
        """Note what the next tokens activated; None: neither theirs nor that of later ones is
        known.
        """
        if experts_TLK is None:
            self.experts.clear()
            self.has_experts = False
        elif self.has_experts:
            self.experts.append(experts_TLK.astype(np.uint16))

    def take_experts(self, num_tokens: int) -> Ints | None:
        """Return the experts of the next tokens; None if they were not noted."""
        if sum(map(len, self.experts)) < num_tokens:
            self.has_experts = False
            return None
        if len(self.experts) > 1:
            self.experts = [np.concatenate(self.experts)]
        (experts_TLK,) = self.experts
        self.experts = [experts_TLK[num_tokens:]]
        first: Ints = experts_TLK[:num_tokens].copy()  # a view would keep those of the whole prompt
        return first

    def move_to(self, node: Node) -> None:
        """Go on below a whole block that is one below the last."""
        self.node = node
        self.num_tokens += BLOCK


def known_path(root: Node, token_ids: Sequence[int]) -> list[Node]:
    """The root, and the whole blocks with which these tokens begin."""
    path = [root]
    for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
        node = path[-1].below.get(tuple(token_ids[start : start + BLOCK]))
        if node is None:
            break
        path.append(node)
    return path


def up_to_state(path: list[Node], token_ids: Sequence[int]) -> tuple[list[Node], Node | None]:
    """The part of a path that leads to its last state, and the shorter block that has it, if it is
    behind one.
    """
    while True:
        rest = tuple(token_ids[(len(path) - 1) * BLOCK :][:BLOCK])
        fitting = [
            node
            for tokens, node in path[-1].below.items()
            if node.state is not None and len(tokens) < BLOCK and rest[: len(tokens)] == tokens
        ]
        if fitting:
            return path, max(fitting, key=lambda node: len(node.tokens))
        if path[-1].state is not None or len(path) == 1:
            return path, None
        path = path[:-1]


def files_of(node: Node) -> dict[str, Kept]:
    """The blocks that lead to this one, it, and their states, by the names of their files."""
    found: list[tuple[str, Kept]] = []
    while node.above is not None:
        if node.state is not None:
            found.append((f"{node.name}.state", node.state))
        found.append((f"{node.name}.block", node))
        node = node.above
    return dict(reversed(found))
