"""The cache of prefixes, and the store on disk, that the options of the server name."""

from __future__ import annotations

import logging

from moe_infinity.errors import ConfigError, MoEInfinityError
from moe_infinity.model import MoE
from moe_infinity.prefixes.cache_layers import has_recurrent_layers
from moe_infinity.prefixes.continuing import why_not
from moe_infinity.prefixes.prefix_cache import PREFIX_SHARE, PrefixCache
from moe_infinity.prefixes.prompt_store import PromptStore
from moe_infinity.prefixes.store_key import open_store
from moe_infinity.server.config import ServeConfig
from moe_infinity.server.generation import Generation
from moe_infinity.sizes import parse_size

logger = logging.getLogger(__name__)


def store_of(moe: MoE, config: ServeConfig) -> PromptStore | None:
    """The store that the options name; None if there is to be none, or none can be. The log says
    why.
    """
    gives_exact_bits = config.max_batch == 1 and moe.config.is_exact
    is_off = config.prefix_cache == "off" or (config.prefix_cache is None and gives_exact_bits)
    if config.prompt_store == "off" or is_off:
        return None
    try:
        return open_store(moe, config.prompt_store, config.prompt_store_size)
    except (OSError, RuntimeError, MoEInfinityError) as error:
        logger.warning("prompts are not kept on disk: %s", error)
        return None


def prefixes_of(
    moe: MoE, config: ServeConfig, reason: str | None, store: PromptStore | None
) -> PrefixCache:
    """Return the cache of prefixes, with 0 bytes if none are kept. `reason`: why a prompt cannot be
    computed in parts. `store`: where they are kept on disk, too. Raises ConfigError for a text that
    is not a size, and for a size where a model's prefixes cannot be kept.
    """
    wanted = config.prefix_cache
    gives_exact_bits = config.max_batch == 1 and moe.config.is_exact
    if wanted == "off" or (wanted is None and gives_exact_bits):
        return PrefixCache(0, store=store)
    reason = reason or why_not(moe.model.config)
    if reason is not None:
        if wanted is not None:
            raise ConfigError(f"prefixes of this model cannot be kept: {reason}")
        logger.info("no prefixes are kept: %s", reason)
        return PrefixCache(0, store=store)
    free_bytes = max(moe.engine.room.left() + moe.engine.room.movable(), 0)
    if wanted is None:
        num_bytes = int(free_bytes * PREFIX_SHARE)
    else:
        num_bytes = parse_size(wanted, whole_bytes=free_bytes)
    return PrefixCache(
        num_bytes,
        has_states=has_recurrent_layers(moe.model.config),
        end_ids=Generation(moe.model).end_ids,
        store=store,
        make_room=moe.engine.room.keep_free,
    )
