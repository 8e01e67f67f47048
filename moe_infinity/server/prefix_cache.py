"""Keys and values of prompts and answers, kept for later requests that begin with the same tokens.

    tree   of blocks of BLOCK tokens: one below another continues it; its roots are the owners
    pool   for each tensor of the KV cache one that has it for every block

A request copies its longest known prefix and computes the rest. Blocks are added as soon as they
are complete, so running sequences share, too. The block that was used least recently goes first;
as a use of a block is one of all above it, none goes before what is below it. Owners see nothing of
each other's blocks, not even by the time an answer takes.

With a block are the experts that its tokens activated, so that a request has the Expert Activation
Matrix of all its tokens. Legend: N blocks, H heads, d width of a head, L MoE layers, K experts of a
token.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from moe_infinity.experts import Ints

logger = logging.getLogger(__name__)
BLOCK = 16  # tokens
Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """A block, or the root of an owner's blocks."""

    above: Node | None
    tokens: Tokens
    place: int  # in the pool
    experts: Ints | None = None  # uint16 [BLOCK, L, K]; None: not known
    below: dict[Tokens, Node] = field(default_factory=dict)
    is_kept: bool = True


class Part(NamedTuple):
    """One tensor of the pool."""

    layer_idx: int  # in the KV cache
    name: str  # keys or values
    pool: Tensor  # [N, H, BLOCK, d]


class Branch:
    """The blocks of one sequence, as it grows."""

    def __init__(self, root: Node) -> None:
        self.node = root  # the last block that the tree has
        self.num_tokens = 0  # up to its end
        self.experts: list[Ints] = []  # of the tokens behind it, [T, L, K] each
        self.has_experts = True

    def note(self, experts_TLK: Ints | None) -> None:
        """What the next tokens activated; None: not known, nor will be of those behind them."""
        if experts_TLK is None:
            self.experts.clear()
            self.has_experts = False
        elif self.has_experts:
            self.experts.append(experts_TLK.astype(np.uint16))

    def take_experts(self) -> Ints | None:
        """Of the next block; None if it was not noted."""
        if sum(map(len, self.experts)) < BLOCK:
            self.has_experts = False
            return None
        experts_TLK = np.concatenate(self.experts)
        self.experts = [experts_TLK[BLOCK:]]
        return experts_TLK[:BLOCK]


class PrefixCache:
    """Of one model, for one thread. With 0 bytes nothing is kept."""

    needs_windows = True  # also tokens that a sliding window passes over within a prompt

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes  # at most
        self._roots: dict[str, Node] = {}
        self._nodes: OrderedDict[Node, None] = OrderedDict()  # the least recently used first
        self._parts: list[Part] = []
        self._free: list[int] = []  # places of the pool
        self._block_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Keys and values that are kept now."""
        return len(self._nodes) * self._block_bytes

    def branch(self, owner: str) -> Branch:
        """For a sequence that begins."""
        return Branch(self._roots.setdefault(owner, Node(None, (), -1)))

    def find(self, branch: Branch, token_ids: Sequence[int]) -> list[Node]:
        """The blocks with which these tokens begin. Moves the branch to the end of the last."""
        found: list[Node] = []
        for start in range(0, len(token_ids) - BLOCK + 1, BLOCK):
            node = branch.node.below.get(tuple(token_ids[start : start + BLOCK]))
            if node is None:
                break
            found.append(node)
            branch.node = node
            branch.num_tokens += BLOCK
        self._use(branch.node)
        return found

    def fill(self, cache: DynamicCache, nodes: Sequence[Node], device: torch.device) -> None:
        """Put the keys and values of these blocks into an empty cache of one sequence."""
        places_N = torch.tensor([node.place for node in nodes], dtype=torch.long, device="cpu")
        found: dict[int, dict[str, Tensor]] = {}
        for part in self._parts:
            x_NHBd = part.pool[places_N]
            flat = x_NHBd.transpose(0, 1).reshape(1, x_NHBd.shape[1], -1, x_NHBd.shape[3])
            found.setdefault(part.layer_idx, {})[part.name] = flat.to(device)
        for layer_idx, tensors in found.items():
            layer: Any = cache.layers[layer_idx]
            layer.lazy_initialization(tensors["keys"], tensors["values"])
            first = 0
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = len(nodes) * BLOCK
                first = max(0, layer.cumulative_length - layer.sliding_window + 1)
            layer.keys, layer.values = (
                tensors[name][:, :, first:].contiguous() for name in ("keys", "values")
            )

    def extend(
        self,
        branch: Branch,
        token_ids: Sequence[int],
        cache: DynamicCache,
        row: int,
        end: int,
        *,
        is_end: bool = False,  # of a prompt or an answer; blocks are added before, too
    ) -> None:
        """Add the blocks of a sequence that are complete and not there yet. `end` is the number of
        tokens that row `row` of `cache` has keys and values of, right-aligned. What a sliding
        window has passed over is not there any more, and no block is added behind such a gap.
        """
        if self.num_bytes == 0 or end - branch.num_tokens < BLOCK or not branch.node.is_kept:
            return
        self._make_pool(cache)
        self._use(branch.node)  # so that only blocks of others are older
        while end - branch.num_tokens >= BLOCK:
            start = branch.num_tokens
            tokens = tuple(token_ids[start : start + BLOCK])
            experts = branch.take_experts()
            node = branch.node.below.get(tokens)
            if node is None:
                node = self._added(branch.node, tokens, experts, cache, row, end - start)
            if node is None:
                break
            branch.node = node
            branch.num_tokens += BLOCK
        self._use(branch.node)

    def _make_pool(self, cache: DynamicCache) -> None:
        """When the shapes are known."""
        if self._block_bytes:
            return
        shapes = {
            (idx, name): getattr(layer, name)
            for idx, layer in enumerate(cache.layers)
            if layer.is_initialized and layer.keys is not None  # else it shares another's
            for name in ("keys", "values")
        }
        self._block_bytes = sum(
            x.shape[1] * BLOCK * x.shape[3] * x.element_size() for x in shapes.values()
        )
        num_blocks = self.num_bytes // max(self._block_bytes, 1)
        if num_blocks == 0:
            logger.warning("no block of %d tokens fits into the prefix cache", BLOCK)
        self._free = list(range(num_blocks))[::-1]
        self._parts = [
            Part(idx, name, x.new_empty((num_blocks, x.shape[1], BLOCK, x.shape[3]), device="cpu"))
            for (idx, name), x in shapes.items()
        ]

    def _added(
        self,
        above: Node,
        tokens: Tokens,
        experts: Ints | None,
        cache: DynamicCache,
        row: int,
        behind: int,  # from the end of the cache to the block's first token
    ) -> Node | None:
        """None if a window has passed over the block, or there is no room below `above`."""
        own = [getattr(cache.layers[part.layer_idx], part.name) for part in self._parts]
        if not own or min(x_BHTd.shape[2] for x_BHTd in own) < behind:
            return None
        if not self._free:
            self._drop_oldest(above)
        if not self._free:
            return None
        node = Node(above, tokens, self._free.pop(), experts)
        for part, x_BHTd in zip(self._parts, own, strict=True):
            first = x_BHTd.shape[2] - behind
            part.pool[node.place] = x_BHTd[row, :, first : first + BLOCK]
        above.below[tokens] = node
        self._nodes[node] = None
        return node

    def _drop_oldest(self, needed: Node) -> None:
        """Unless it is of the branch that is to be continued."""
        oldest = next(iter(self._nodes), needed)
        if oldest is needed or oldest.below:  # all that is kept is this one branch
            return
        del self._nodes[oldest]
        assert oldest.above is not None
        del oldest.above.below[oldest.tokens]
        oldest.is_kept = False
        self._free.append(oldest.place)

    def _use(self, node: Node | None) -> None:
        """Of this block and all above it, which come last."""
        while node is not None and node.above is not None:
            self._nodes.move_to_end(node)
            node = node.above


def why_not(config: Any) -> str | None:
    """Why prefixes of a model cannot be reused; None if they can."""
    for layer in DynamicCache(config=config).layers:
        kind = type(layer)
        if kind is DynamicSlidingWindowLayer and layer.sliding_window <= BLOCK:
            return f"its sliding windows have {layer.sliding_window} tokens"
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"of a {kind.__name__} no part can be copied"
    return None
