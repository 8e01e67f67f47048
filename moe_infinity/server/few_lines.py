"""The log gets few lines of a kind, however many there are to write."""

from __future__ import annotations

import logging

BURST = 20  # lines of a kind that may come at once; then there is one a second
KINDS = 1_000  # that are remembered
LOGGERS = (
    "asyncio",
    "uvicorn.error",
    "moe_infinity.server.connections",
    "moe_infinity.server.engine",
    "moe_infinity.server.exchange",
    "moe_infinity.server.fields",
    "moe_infinity.server.messages",
    "moe_infinity.server.prompts",
    "moe_infinity.server.routes",
)


class FewLines(logging.Filter):
    """Lets one line of a kind through in a second. It says how many it left out before."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[str, tuple[float, float, int]] = {}  # lines left, when, left out

    def filter(self, record: logging.LogRecord) -> bool:
        """Kinds are the texts of lines, before values are put into them."""
        kind = str(record.msg)
        left, then_s, num_left_out = self._kinds.get(kind, (BURST, record.created, 0))
        left = min(left + record.created - then_s, BURST)
        is_shown = left >= 1
        if len(self._kinds) < KINDS or kind in self._kinds:
            self._kinds[kind] = left - is_shown, record.created, (not is_shown) * (num_left_out + 1)
        if is_shown and num_left_out:
            record.msg = f"{record.getMessage()} (and {num_left_out} more lines of this kind)"
            record.args = ()
        return is_shown


def log_few_lines() -> None:
    """Let loggers write few lines of a kind."""
    few_lines = FewLines()
    for name in LOGGERS:
        logging.getLogger(name).addFilter(few_lines)
