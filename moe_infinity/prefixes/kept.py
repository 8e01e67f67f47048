"""The prompt of one command, which begins with what a folder has of it and is kept there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from moe_infinity.errors import CheckpointError
from moe_infinity.prefixes.loaded import Loaded
from moe_infinity.prefixes.prefix_cache import LEAST_TOKENS, PrefixCache
from moe_infinity.prefixes.prefix_tree import BLOCK
from moe_infinity.prefixes.prompt_passes import PromptPasses, one_prompt
from moe_infinity.prefixes.store_key import open_store

logger = logging.getLogger(__name__)
SHARE = 0.25  # of the memory that is not taken by the model's dense weights: for one prompt
OWNER = ""  # as of a request to the server without an API key


class KeptPrompt:
    """Takes the place of a `Prefix` in `generate()` and `stream()`."""

    def __init__(self, passes: PromptPasses, prefixes: PrefixCache) -> None:
        self._passes = passes
        self._prefixes = prefixes

    def begin(self, moe: Loaded, named: Mapping[str, Any]) -> dict[str, Any]:
        """Compute all of a prompt but its last token, behind what is known of it. Returns the
        argument of `generate()` that goes on from there; none for a short prompt, or one beyond the
        original length of a rotary embedding.
        """
        prompt_ids = one_prompt(moe.model, named)
        ids = prompt_ids[:-1]  # there is no first token without the logits of the last
        if len(ids) < LEAST_TOKENS or not self._passes.is_usual(len(prompt_ids)):
            return {}
        owner = OWNER, self._passes.regime(len(prompt_ids))
        branch = self._prefixes.branch(owner)
        nodes = self._prefixes.find(branch, ids)
        cache = self._passes.empty_cache()
        start = sum(len(node.tokens) for node in nodes)
        if nodes:
            self._prefixes.fill(cache, nodes, moe.model.device)
            logger.info("%d of the prompt's %d tokens were kept", start, len(prompt_ids))
        experts = [node.experts for node in nodes if node.experts is not None]
        is_known = nodes and len(experts) == len(nodes)
        self._passes.begin(ids[:start], np.concatenate(experts) if is_known else None)
        while start < len(ids):
            end = self._passes.end_of_pass(start, len(ids))
            end, is_end = self._prefixes.pass_end(branch, ids, start, end)
            with self._passes.keeping_windows(cache, is_last=end == len(ids)):
                branch.note(self._passes.compute(cache, ids, start, end))
                self._prefixes.extend(branch, ids, cache, 0, end, is_end=is_end)
            start = end
        num_kept = self._prefixes.num_known(owner, ids)
        if num_kept < len(ids) - BLOCK:
            logger.warning(
                "memory has room to keep %d of the prompt's %d tokens: the others are computed "
                "again next time\nhint: raise --memory",
                num_kept,
                len(prompt_ids),
            )
        return self._passes.arguments(cache)


@contextmanager
def kept_prompt(moe: Loaded, folder: str, size: str) -> Iterator[KeptPrompt | None]:
    """Gives a prompt that is kept in a folder, whose files take at most `size`. At the end it waits
    a limited time until it is written. Raises UnsupportedModelError, ConfigError or
    CheckpointError; None, with a warning, for a folder that cannot be used.
    """
    store = None
    try:
        store = open_store(moe, folder, size)
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        logger.warning("the prompt is not kept on disk: %s", error)
    if store is None:
        yield None
        return
    passes = PromptPasses(moe, is_tried=not store.is_empty)
    room = moe.engine.room
    ends = moe.model.generation_config.eos_token_id
    prefixes = PrefixCache(
        int(max(room.left() + room.movable(), 0) * SHARE),
        has_states=passes.has_states,
        end_ids=np.ravel([] if ends is None else ends).tolist(),
        store=store,
        make_room=room.keep_free,
    )
    try:
        yield KeptPrompt(passes, prefixes)
    finally:
        prefixes.close()
