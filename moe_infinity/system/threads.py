"""Threads that serve as long as their process lives: an error delays them and does not end them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

FIRST_PAUSE_S = 0.01  # after an error; twice as long after each further one in a row
LONGEST_PAUSE_S = 1.0
LINE_PERIOD_S = 1.0

logger = logging.getLogger(__name__)


class Seldom:
    """Tells once a second that a log line is due which others can cause as often as they like."""

    def __init__(self) -> None:
        self._due_at = 0.0

    def __call__(self) -> bool:
        now = time.monotonic()
        if now < self._due_at:
            return False
        self._due_at = now + LINE_PERIOD_S
        return True


def keep_running(turn: Callable[[], bool], what: str) -> None:
    """Call `turn` until it returns False. After an error there is a pause, and a log line that says
    `what` goes on, unless it would be the same as the last one or come within a second of it.
    """
    is_due = Seldom()
    said: str | None = None  # since `turn` worked last
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            if not turn():
                return
        except Exception as error:
            about = f"{type(error).__name__}: {error}"
            if about != said and is_due():
                is_debugging = logger.isEnabledFor(logging.DEBUG)
                logger.warning("%s goes on after %s", what, about, exc_info=is_debugging)
                said = about
        else:
            said = None
            pause_s = FIRST_PAUSE_S
            continue
        time.sleep(pause_s)  # outside the handler: the error refers to what `turn` has used
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
