"""Keys and values of prompts and answers, kept for later requests that begin with the same tokens.

    tree   of blocks of BLOCK tokens: one below another continues it; its roots are the owners
    pool   for each tensor of the KV cache one that has it for every block

A request copies its longest known prefix and computes the rest. Blocks are added as soon as they
are complete, so running sequences share, too. The block that was used least recently goes first;
as a use of a block is one of all above it, none goes before what is below it. Owners see nothing of
each other's blocks, not even by the time an answer takes. An owner of prompts that a model computes
differently, because of their length, counts as several.

With a block are the experts that its tokens activated, so that a request has the Expert Activation
Matrix of all its tokens.

A recurrent state is that of all tokens so far: no part of it is the state of fewer. So of a model
with recurrent layers the whole cache is kept where a prompt ends and where an answer ends
(`Snapshots`), and a request continues the longest that its prompt begins with.

Legend: N blocks, H heads, d width of a head, L MoE layers, K experts of a
token.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from moe_infinity.architectures.attention_inputs import keeps_nothing
from moe_infinity.errors import MoEInfinityError
from moe_infinity.experts import Ints, Phase, Step
from moe_infinity.model import MoE
from moe_infinity.server.batch import bytes_of, row_of, with_tensors

logger = logging.getLogger(__name__)
BLOCK = 16  # tokens
# A block counts as this much however small its keys and values are: its tokens and its node take
# about as much. So `num_bytes` bounds the number of blocks in any case.
LEAST_BLOCK_BYTES = 512
TRIAL_TOKENS = 32  # of `why_no_snapshots`
TRIAL_CUT = 19  # tokens of the first of two passes
# Of the largest logit. Models that continue were seen to differ by 1e-5 in float32 and by 0.01 in
# bfloat16, one that does not by 0.5.
TOLERANCE = {torch.float32: 1e-3}
COARSE_TOLERANCE = 0.05
Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Node:
    """A block, or the root of an owner's blocks."""

    above: Node | None
    tokens: Tokens
    pool_idx: int
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
        """Note what the next tokens activated; None: neither theirs nor that of later ones is
        known.
        """
        if experts_TLK is None:
            self.experts.clear()
            self.has_experts = False
        elif self.has_experts:
            self.experts.append(experts_TLK.astype(np.uint16))

    def take_experts(self) -> Ints | None:
        """Return the experts of the next block; None if they were not noted."""
        if sum(map(len, self.experts)) < BLOCK:
            self.has_experts = False
            return None
        experts_TLK = np.concatenate(self.experts)
        self.experts = [experts_TLK[BLOCK:]]
        return experts_TLK[:BLOCK]


class PrefixCache:
    """The prefixes of one model, for one thread. With 0 bytes nothing is kept."""

    needs_windows = True  # also tokens that a sliding window passes over within a prompt

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes  # at most
        self._roots: dict[Hashable, Node] = {}
        self._nodes: OrderedDict[Node, None] = OrderedDict()  # the least recently used first
        self._parts: list[Part] = []
        self._free: list[int] = []  # places of the pool
        self._block_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Keys and values that are kept now."""
        return len(self._nodes) * self._block_bytes

    def branch(self, owner: Hashable) -> Branch:
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
        places_N = torch.tensor([node.pool_idx for node in nodes], dtype=torch.long, device="cpu")
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
        if self._parts:
            return
        shapes = {
            (idx, name): getattr(layer, name)
            for idx, layer in enumerate(cache.layers)
            if layer.is_initialized and layer.keys is not None  # else it shares another's
            for name in ("keys", "values")
        }
        if not shapes:
            return
        num_bytes = sum(x.shape[1] * BLOCK * x.shape[3] * x.element_size() for x in shapes.values())
        self._block_bytes = max(num_bytes, LEAST_BLOCK_BYTES)
        num_blocks = self.num_bytes // self._block_bytes
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
            part.pool[node.pool_idx] = x_BHTd[row, :, first : first + BLOCK]
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
        self._free.append(oldest.pool_idx)

    def _use(self, node: Node | None) -> None:
        """Mark this block, and all above it, as used last."""
        while node is not None and node.above is not None:
            self._nodes.move_to_end(node)
            node = node.above


def why_not(config: Any) -> str | None:
    """Why prefixes of a model cannot be reused; None if they can."""
    for layer in DynamicCache(config=config).layers:
        kind = type(layer)
        if kind is DynamicSlidingWindowLayer and layer.sliding_window <= BLOCK:
            return f"its sliding windows have {layer.sliding_window} tokens"
        if kind not in (DynamicLayer, DynamicSlidingWindowLayer) and not keeps_nothing(layer):
            return f"of a {kind.__name__} no part can be copied"
    return None


class Snapshots:
    """The snapshots of one model, for one thread, with the methods of PrefixCache."""

    needs_windows = False

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes  # at most
        self.used_bytes = 0
        self._roots: dict[Hashable, Node] = {}
        self._kept: OrderedDict[Node, DynamicCache] = OrderedDict()  # the least recently used first

    def branch(self, owner: Hashable) -> Branch:
        """For a sequence that begins."""
        return Branch(self._roots.setdefault(owner, Node(None, (), -1)))

    def find(self, branch: Branch, token_ids: Sequence[int]) -> list[Node]:
        """The longest that these tokens begin with, if there is one."""
        known = tuple(token_ids)
        fitting = [node for ids, node in branch.node.below.items() if known[: len(ids)] == ids]
        if not fitting:
            return []
        longest = max(fitting, key=lambda node: len(node.tokens))
        self._kept.move_to_end(longest)
        branch.num_tokens = len(longest.tokens)
        branch.note(longest.experts)
        return [longest]

    def fill(self, cache: DynamicCache, nodes: Sequence[Node], device: torch.device) -> None:
        """Let an empty cache of one sequence continue what was found."""
        (node,) = nodes
        cache.layers = [
            with_tensors(layer, lambda x: x.to(device, copy=True))
            for layer in self._kept[node].layers
        ]

    def extend(
        self,
        branch: Branch,
        token_ids: Sequence[int],
        cache: DynamicCache,
        row: int,
        end: int,
        *,
        is_end: bool,
    ) -> None:
        """Keep row `row` of `cache`, of `end` tokens, if a prompt or an answer ends there."""
        tokens = tuple(token_ids[:end])
        if not is_end or tokens in branch.node.below:
            return
        kept = row_of(cache, row, end)
        kept.layers = [with_tensors(layer, lambda x: x.to("cpu")) for layer in kept.layers]
        num_bytes = bytes_of(kept)
        if num_bytes > self.num_bytes:
            logger.info("a cache of %d bytes does not fit into --prefix-cache", num_bytes)
            return
        while self.used_bytes + num_bytes > self.num_bytes:
            self._drop_oldest()
        experts = np.concatenate(branch.experts) if branch.has_experts else None
        node = Node(branch.node, tokens, -1, experts)
        branch.node.below[tokens] = node
        self._kept[node] = kept
        self.used_bytes += num_bytes

    def _drop_oldest(self) -> None:
        node, cache = self._kept.popitem(last=False)
        assert node.above is not None
        del node.above.below[node.tokens]
        self.used_bytes -= bytes_of(cache)


def why_no_snapshots(moe: MoE) -> str | None:
    """Why a model cannot continue such a cache; None if it can. Some models begin anew with every
    pass of several tokens. It shows in the logits of a prompt, computed in one and in two passes.
    """
    try:
        (whole,) = _logits_of(moe, [TRIAL_TOKENS])
        _, continued = _logits_of(moe, [TRIAL_CUT, TRIAL_TOKENS])
    except MoEInfinityError as error:
        return f"trying to continue a prompt failed: {error}"
    difference = (continued - whole[TRIAL_CUT:]).abs().max() / whole.abs().max()
    tolerance = TOLERANCE.get(moe.model.dtype, COARSE_TOLERANCE)
    if difference <= tolerance:
        return None
    return (
        f"a prompt in two passes has other logits than in one (by {difference:.2g} of the largest)"
    )


def _logits_of(moe: MoE, ends: Sequence[int]) -> list[Tensor]:
    """[T, V] float32 of each pass over a prompt that is cut at `ends`."""
    cache = DynamicCache(config=moe.model.config)
    vocab_size = moe.model.config.get_text_config().vocab_size
    ids = torch.arange(TRIAL_TOKENS, device="cpu") * 5 % vocab_size
    logits = []
    for start, end in zip([0, *ends], ends, strict=False):
        begins_B = np.array([start == 0])
        output = moe.forward(
            Step(Phase.PREFILL, 1, end - start, begins_B=begins_B),
            input_ids=ids[None, start:end],
            attention_mask=torch.ones((1, end), dtype=torch.long, device="cpu"),
            position_ids=torch.arange(start, end, device="cpu")[None],
            cache=cache,
            use_cache=True,
        )
        logits.append(output.logits[0].to("cpu", torch.float32))
    return logits
