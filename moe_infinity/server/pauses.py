"""Pauses of an asynchronous stream are seen by whoever reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

# Between two signs of life of a stream that has nothing to say: proxies and clients give up after
# 30 s or more without a byte.
LIFE_PERIOD_S = 5.0
Item = TypeVar("Item")


async def with_pauses(
    items: AsyncGenerator[Item, None], period_s: float
) -> AsyncGenerator[Item | None, None]:
    """Items as they come, and None after each period without one. Raises what `items` raises, and
    closes it.
    """
    async with aclosing(items):
        while True:
            coming = asyncio.ensure_future(anext(items, None))
            try:
                while not (await asyncio.wait({coming}, timeout=period_s))[0]:
                    yield None
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.gather(coming, return_exceptions=True)
            item = coming.result()
            if item is None:
                return
            yield item
