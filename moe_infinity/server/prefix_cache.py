"""Keys, values and states of prompts and answers, kept for later requests that begin with the same
tokens.

    tree   of blocks of BLOCK tokens: one below another continues it; its roots are the owners
    state  of a model with recurrent layers, behind some of the blocks: it is that of all tokens so
           far, and no part of it is the state of fewer

A request copies its longest known prefix and computes the rest. Where there are states, it ends at
one. Blocks are added as soon as they are complete, so running sequences share, too; a state where a
prompt, its last message or an answer ends, where prompts part, and in a long text every so many
tokens. There a block may be shorter, and none is below it.

What was used least recently goes first. As a use of a block is one of all above it, none goes
before what is below it, and a state goes before the blocks that lead to it. Owners see nothing of
each other's blocks, not even by the time an answer takes. An owner of prompts that a model computes
differently, because of their length, counts as several.

With a block are the experts that its tokens activated, so that a request has the Expert Activation
Matrix of all its tokens.

Legend: L MoE layers, K experts of a token, T tokens.
"""

from __future__ import annotations

import hashlib
import logging
from collections import OrderedDict
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from moe_infinity.experts import Ints
from moe_infinity.server.cache_bytes import Block, CacheBytes

logger = logging.getLogger(__name__)
BLOCK = 16  # tokens
# A block counts as this much however small its keys and values are: its tokens and its node take
# about as much. So `num_bytes` bounds the number of blocks in any case.
LEAST_BLOCK_BYTES = 512
# Between two states inside a text. They are as far apart as a state has the bytes of keys and
# values, so that they take no more than these, within bounds.
LEAST_SPACING = 256
MOST_SPACING = 2048
LEAST_TOKENS = 256  # computing fewer again costs less than what it takes to keep them
Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class State:
    """What a model with recurrent layers has of all tokens up to the end of a block."""

    node: Node
    data: Tensor  # uint8

    @property
    def num_bytes(self) -> int:
        return max(self.data.nbytes, LEAST_BLOCK_BYTES)


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

    def path(self) -> list[Node]:
        """All blocks from the root's first to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None and node.above is not None:
            found.append(node)
            node = node.above
        return found[::-1]


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
        experts_TLK = np.concatenate(self.experts)
        self.experts = [experts_TLK[num_tokens:]]
        return experts_TLK[:num_tokens]

    def move_to(self, node: Node) -> None:
        """Go on below a whole block that is one below the last."""
        self.node = node
        self.num_tokens += BLOCK


class PrefixCache:
    """The prefixes of one model, for one thread. With 0 bytes nothing is kept."""

    def __init__(
        self, num_bytes: int, *, has_states: bool = False, end_ids: Container[int] = ()
    ) -> None:
        """`has_states`: the model has recurrent layers. `end_ids`: tokens that end a message."""
        self.num_bytes = num_bytes  # at most
        self.has_states = has_states
        self.end_ids = end_ids
        self.used_bytes = 0  # of blocks and states that are kept now
        self._roots: dict[Hashable, Node] = {}
        self._kept: OrderedDict[Node | State, None] = OrderedDict()  # least recently used first
        self._bytes: CacheBytes | None = None  # None: no cache was seen yet
        self._has_warned = False

    @property
    def needs_windows(self) -> bool:
        """True if it wants tokens that a sliding window passes over within a prompt, too."""
        return not self.has_states

    def branch(self, owner: Hashable) -> Branch:
        """For a sequence that begins."""
        root = Node(None, (), name_below(repr(owner), ()))
        return Branch(self._roots.setdefault(owner, root))

    def find(self, branch: Branch, token_ids: Sequence[int]) -> list[Node]:
        """The blocks with which these tokens begin. Moves the branch to the end of the last whole
        one.
        """
        path = [branch.node]
        for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
            node = path[-1].below.get(tuple(token_ids[start : start + BLOCK]))
            if node is None:
                break
            path.append(node)
        short = None
        if self.has_states:
            branch.fork = (len(path) - 1) * BLOCK
            path, short = _up_to_state(path, token_ids)
        for node in path[1:]:
            branch.move_to(node)
        found = path[1:]
        if short is not None:
            branch.note(short.experts)
            found.append(short)
        if found:
            branch.state_end = sum(len(node.tokens) for node in found)
            self._use(found[-1])
        return found

    def fill(self, cache: DynamicCache, nodes: Sequence[Node], device: torch.device) -> None:
        """Put the keys and values of these blocks, and the state behind them, into an empty cache
        of one sequence.
        """
        assert self._bytes is not None
        blocks = [Block(len(node.tokens), node.data) for node in nodes if node.data is not None]
        state = nodes[-1].state
        self._bytes.fill(cache, blocks, None if state is None else state.data, device)

    def pass_end(
        self, branch: Branch, token_ids: Sequence[int], start: int, end: int
    ) -> tuple[int, bool]:
        """Where a pass over a prompt from `start` to at most `end` ends, and whether what the model
        has there is to be kept in any case.

        With states it ends where others went on with other tokens, and behind the last message:
        there an answer begins, which a chat template may show otherwise later.
        """
        if not self.has_states:
            return end, end == len(token_ids)
        places = range(len(token_ids) - 1, start, -1)
        message_end = next((at for at in places if token_ids[at - 1] in self.end_ids), start)
        for place in sorted((branch.fork, message_end)):
            if start < place < end and place - branch.state_end >= LEAST_TOKENS:
                return place, True
        begins_answer = end - start < BLOCK and token_ids[start - 1] in self.end_ids
        return end, end == len(token_ids) and not begins_answer

    def extend(
        self,
        branch: Branch,
        token_ids: Sequence[int],
        cache: DynamicCache,
        row: int,
        end: int,
        *,
        is_end: bool = False,  # of a prompt, a message or an answer: the state is kept
    ) -> None:
        """Add the blocks of a sequence that are complete and not there yet. `end` is the number of
        tokens that row `row` of `cache` has keys and values of, right-aligned. What a sliding
        window has passed over is not there any more, and no block is added behind such a gap.
        """
        wants_state = self.has_states and (is_end or end - branch.state_end >= self._spacing)
        if self.num_bytes == 0 or not branch.node.is_kept:
            return
        if end - branch.num_tokens < BLOCK and not wants_state:
            return
        if self._bytes is None:
            self._bytes = CacheBytes.of(cache)
        self._use(branch.node)  # so that only blocks of others are older
        self._add_blocks(branch, token_ids, cache, row, end)
        if wants_state:
            self._add_state(branch, token_ids, cache, row, end)
        self._use(branch.node)

    @property
    def _spacing(self) -> int:
        """Tokens between two states inside a text."""
        if self._bytes is None:
            return LEAST_SPACING
        wanted = self._bytes.state_bytes // max(self._bytes.token_bytes, 1)
        return min(max(wanted, LEAST_SPACING), MOST_SPACING)

    def _add_blocks(
        self, branch: Branch, token_ids: Sequence[int], cache: DynamicCache, row: int, end: int
    ) -> None:
        """Those that are whole."""
        assert self._bytes is not None
        while end - branch.num_tokens >= BLOCK:
            start = branch.num_tokens
            node = branch.node.below.get(tuple(token_ids[start : start + BLOCK]))
            if node is None:
                break
            branch.take_experts(BLOCK)
            branch.move_to(node)
        behind = end - branch.num_tokens
        if behind < BLOCK or not self._bytes.has_tokens(cache, behind):
            return
        blocks = self._bytes.blocks(
            cache, row, behind=behind, size=BLOCK, num_blocks=behind // BLOCK
        )
        for block in blocks:
            start = branch.num_tokens
            experts = branch.take_experts(BLOCK)
            node = self._added(branch.node, token_ids[start : start + BLOCK], block.data, experts)
            if node is None:
                return
            branch.move_to(node)

    def _added(
        self, above: Node, tokens: Sequence[int], data: Tensor, experts: Ints | None
    ) -> Node | None:
        """None if there is no room below `above`."""
        node = Node(above, tuple(tokens), name_below(above.name, tokens), data, experts)
        if not self._has_room(node.num_bytes, above):
            return None
        above.below[node.tokens] = node
        self._keep(node)
        return node

    def _add_state(
        self, branch: Branch, token_ids: Sequence[int], cache: DynamicCache, row: int, end: int
    ) -> None:
        """With a block of the tokens behind the last whole one, if there are any."""
        assert self._bytes is not None
        num_more = end - branch.num_tokens
        if num_more >= BLOCK:  # there was no room
            return
        node = branch.node
        if num_more > 0:
            tokens = tuple(token_ids[branch.num_tokens : end])
            found = node.below.get(tokens)
            if found is None:
                (block,) = self._bytes.blocks(
                    cache, row, behind=num_more, size=num_more, num_blocks=1
                )
                experts = np.concatenate(branch.experts) if branch.has_experts else None
                found = self._added(node, tokens, block.data, experts)
            if found is None:
                return
            node = found
        branch.state_end = end
        if node.above is None or node.state is not None:
            return
        state = State(node, self._bytes.state_of(cache, row, end))
        if self._has_room(state.num_bytes, node):
            node.state = state
            self._keep(state)
            self._use(node)

    def _keep(self, item: Node | State) -> None:
        self._kept[item] = None
        self.used_bytes += item.num_bytes

    def _has_room(self, num_bytes: int, needed: Node) -> bool:
        """Make room, but not by what leads to `needed`."""
        if num_bytes > self.num_bytes and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a block or state of %d bytes does not fit into --prefix-cache", num_bytes
            )
        while self.used_bytes + num_bytes > self.num_bytes:
            if not self._drop_oldest(needed):
                return False
        return True

    def _drop_oldest(self, needed: Node) -> bool:
        """False if all that is kept leads to `needed`."""
        oldest = next(iter(self._kept), needed)
        if isinstance(oldest, Node) and (oldest is needed or oldest.below):
            return False
        del self._kept[oldest]
        self.used_bytes -= oldest.num_bytes
        if isinstance(oldest, State):
            oldest.node.state = None
            return True
        assert oldest.above is not None
        assert oldest.state is None, oldest  # it was used no later than its block
        del oldest.above.below[oldest.tokens]
        oldest.data = None
        return True

    def _use(self, node: Node | None) -> None:
        """Mark the state behind this block, the block, and all above it, as used last."""
        if node is not None and node.state is not None:
            self._kept.move_to_end(node.state)
        while node is not None and node.above is not None:
            self._kept.move_to_end(node)
            node = node.above


def _up_to_state(path: list[Node], token_ids: Sequence[int]) -> tuple[list[Node], Node | None]:
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
