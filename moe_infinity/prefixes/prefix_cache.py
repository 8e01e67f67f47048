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

import logging
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from moe_infinity.experts import Ints
from moe_infinity.prefixes.cache_bytes import MOST_AT_ONCE, Block, CacheBytes
from moe_infinity.prefixes.prefix_tree import (
    BLOCK,
    LEAST_BLOCK_BYTES,
    Branch,
    Node,
    State,
    files_of,
    known_path,
    name_below,
    up_to_state,
)
from moe_infinity.prefixes.prompt_store import PromptStore, StoreCounts
from moe_infinity.prefixes.stored_prefixes import Wanted, wanted_of

logger = logging.getLogger(__name__)
PREFIX_SHARE = 0.1  # of the memory that is not taken by the model's dense weights
# Between two states inside a text. They are as far apart as a state has the bytes of keys and
# values, so that they take no more than these, within bounds.
LEAST_SPACING = 256
MOST_SPACING = 2048
FILLING_COPIES = 2  # of keys and values, while a cache is filled: its blocks, and what they become
LEAST_TOKENS = 256  # computing fewer again costs less than what it takes to keep them


class PrefixCache:
    """The prefixes of one model, for one thread. With 0 bytes nothing is kept."""

    def __init__(
        self,
        num_bytes: int,
        *,
        has_states: bool = False,
        end_ids: Container[int] = (),
        store: PromptStore | None = None,
        make_room: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        """`has_states`: the model has recurrent layers. `end_ids`: tokens that end a message.
        `store`: the same on disk. `make_room`: called before so many bytes are taken at once.
        """
        self.num_bytes = num_bytes  # at most
        self.has_states = has_states
        self.end_ids = end_ids
        self._store = store
        self._make_room = make_room
        self.used_bytes = 0  # of blocks and states that are kept now
        self._roots: dict[Hashable, Node] = {}
        self._kept: OrderedDict[Node | State, None] = OrderedDict()  # least recently used first
        self._bytes: CacheBytes | None = None  # None: no cache was seen yet
        self._has_warned = False

    @property
    def needs_windows(self) -> bool:
        """True if it wants tokens that a sliding window passes over within a prompt, too."""
        return not self.has_states

    @property
    def store_counts(self) -> StoreCounts:
        """Counts of the store; all are 0 if there is none."""
        return StoreCounts() if self._store is None else self._store.counts

    def close(self) -> None:
        """Wait a limited time for what is to be written to the store."""
        if self._store is not None:
            self._store.close()

    def branch(self, owner: Hashable) -> Branch:
        """For a sequence that begins."""
        key = "" if self._store is None else self._store.key
        root = Node(None, (), name_below(f"{key} {owner!r}", ()))
        return Branch(self._roots.setdefault(owner, root))

    def find(self, branch: Branch, token_ids: Sequence[int]) -> list[Node]:
        """The blocks with which these tokens begin. Moves the branch to the end of the last whole
        one.
        """
        if self._store is not None and len(token_ids) >= LEAST_TOKENS:
            self._read_stored(self._store, branch.node, token_ids)
        path = known_path(branch.node, token_ids)
        short = None
        if self.has_states:
            branch.fork = (len(path) - 1) * BLOCK
            path, short = up_to_state(path, token_ids)
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

    def num_known(self, owner: Hashable, token_ids: Sequence[int]) -> int:
        """How many of the first tokens need no computing, by what is in memory. Nothing counts as
        used.
        """
        path = known_path(self._roots.get(owner) or Node(None, (), ""), token_ids)
        short = None
        if self.has_states:
            path, short = up_to_state(path, token_ids)
        return sum(len(node.tokens) for node in (*path, *([] if short is None else [short])))

    def fill(self, cache: DynamicCache, nodes: Sequence[Node], device: torch.device) -> None:
        """Put the keys and values of these blocks, and the state behind them, into an empty cache
        of one sequence.
        """
        assert self._bytes is not None
        self._make_room(FILLING_COPIES * sum(node.num_bytes for node in nodes))
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
        if end - branch.num_tokens < BLOCK and not (wants_state or is_end):
            return
        if self._bytes is None:
            self._bytes = CacheBytes.of(cache)
        self._use(branch.node)  # so that only blocks of others are older
        self._add_blocks(branch, token_ids, cache, row, end)
        last = branch.node
        if wants_state:
            last = self._add_state(branch, token_ids, cache, row, end) or last
        self._use(branch.node)
        if is_end and self._store is not None and end >= LEAST_TOKENS:
            self._store.keep(files_of(last), self._bytes)

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
        num_blocks = behind // BLOCK
        num_bytes = num_blocks * BLOCK * self._bytes.token_bytes
        block_bytes = max(BLOCK * self._bytes.token_bytes, LEAST_BLOCK_BYTES)
        if not self._has_room(block_bytes, branch.node):
            return
        copied = min(num_bytes, MOST_AT_ONCE)  # beside the blocks that stay
        self._make_room(min(num_bytes, self.num_bytes - self.used_bytes) + copied)
        blocks = self._bytes.blocks(cache, row, behind=behind, size=BLOCK, num_blocks=num_blocks)
        for block in blocks:
            if not self._has_room(block_bytes, branch.node):
                return  # the experts stay with the branch's next tokens
            start = branch.num_tokens
            experts = branch.take_experts(BLOCK)
            node = self._added(branch.node, token_ids[start : start + BLOCK], block.data, experts)
            assert node is not None
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
    ) -> Node | None:
        """With a block of the tokens behind the last whole one, if there are any. Returns the last
        block before the state.
        """
        assert self._bytes is not None
        num_more = end - branch.num_tokens
        if num_more >= BLOCK:  # there was no room
            return None
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
                return None
            node = found
        branch.state_end = end
        if node.above is not None and node.state is None:
            self._set_state(node, self._bytes.state_of(cache, row, end))
        return node

    def _set_state(self, node: Node, data: Tensor) -> None:
        """If there is room."""
        state = State(node, data)
        if self._has_room(state.num_bytes, node):
            node.state = state
            self._keep(state)
            self._use(node)

    # what the store has

    def _read_stored(self, store: PromptStore, root: Node, token_ids: Sequence[int]) -> None:
        """Put what the store has of these tokens into the tree."""
        path = known_path(root, token_ids)

        def look() -> tuple[Wanted, int]:
            wanted = wanted_of(
                store, path, token_ids, has_states=self.has_states, most_bytes=self.num_bytes
            )
            return wanted, sum(store.size(file) or 0 for file in wanted.files())

        answer = store.ask(look)
        if answer is None:
            return
        wanted, num_bytes = answer
        self._make_room(num_bytes)
        found = store.read(wanted.files())
        if not found or any(stored.parts != (self._bytes or found[0].parts) for stored in found):
            return
        self._bytes = found[0].parts
        state = found.pop(0) if self.has_states else None
        node = path[wanted.num_whole]
        self._use(node)
        end = wanted.num_whole * BLOCK
        for absent, stored in zip(wanted.blocks, found, strict=False):
            below = node.below.get(absent.tokens)
            if below is None:
                below = self._added(node, absent.tokens, stored.data, stored.experts)
            if below is None:
                break
            node = below
            end += len(absent.tokens)
        self._use(node)
        if state is not None and end == wanted.end:
            self._set_state(node, state.data)
        if end > wanted.known and (state is None or node.state is not None):
            store.counts.hits += 1
            store.counts.tokens += end - wanted.known

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

    def give_way(self) -> bool:
        """Drop all that is kept. False if there is nothing."""
        is_any = len(self._kept) > 0
        for item in self._kept:
            item.data = None
        for root in self._roots.values():
            root.below.clear()
        self._kept.clear()
        self.used_bytes = 0
        return is_any

    def _drop_oldest(self, needed: Node) -> bool:
        """False if all that is kept leads to `needed`."""
        oldest = next(iter(self._kept), needed)
        if isinstance(oldest, Node) and (oldest is needed or oldest.below):
            return False
        del self._kept[oldest]
        self.used_bytes -= oldest.num_bytes
        oldest.data = None
        if isinstance(oldest, State):
            oldest.node.state = None
            return True
        assert oldest.above is not None
        assert oldest.state is None, oldest  # it was used no later than its block
        del oldest.above.below[oldest.tokens]
        return True

    def _use(self, node: Node | None) -> None:
        """Mark the state behind this block, the block, and all above it, as used last."""
        if node is not None and node.state is not None:
            self._kept.move_to_end(node.state)
        while node is not None and node.above is not None:
            self._kept.move_to_end(node)
            node = node.above
