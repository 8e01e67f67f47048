"""Caches of models with recurrent layers, kept whole for later requests that begin with the same
tokens.

A recurrent state is that of all tokens so far: no part of it is the state of fewer. So the whole
cache is kept where a prompt ends and where an answer ends, and a request continues the longest that
its prompt begins with. Those used least recently go first. Owners see nothing of each other's.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from moe_infinity.errors import MoEInfinityError
from moe_infinity.experts import Phase, Step
from moe_infinity.model import MoE
from moe_infinity.server.batch import bytes_of, row_of, with_tensors
from moe_infinity.server.prefix_cache import Branch, Node

logger = logging.getLogger(__name__)
TRIAL_TOKENS = 32
TRIAL_CUT = 19  # tokens of the first of two passes
# Of the largest logit. Models that continue were seen to differ by 1e-5 in float32 and by 0.01 in
# bfloat16, one that does not by 0.5.
TOLERANCE = {torch.float32: 1e-3}
COARSE_TOLERANCE = 0.05


class Snapshots:
    """Of one model, for one thread. Has the methods of PrefixCache."""

    needs_windows = False

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes  # at most
        self.used_bytes = 0
        self._roots: dict[str, Node] = {}
        self._kept: OrderedDict[Node, DynamicCache] = OrderedDict()  # the least recently used first

    def branch(self, owner: str) -> Branch:
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
            past_key_values=cache,
            use_cache=True,
        )
        logits.append(output.logits[0].to("cpu", torch.float32))
    return logits
