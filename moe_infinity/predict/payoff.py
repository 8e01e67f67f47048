"""Whether prefetch pays on this machine, for this model and this text: measured now and then, as a
disk, a processor or a prediction that is not good enough makes it cost more than it saves.

    decode steps   32 without | 4 without, 8 with, 4 without | 256 as was faster | 16 of a trial ...

The four blocks of a trial stand so that a cache which fills up meanwhile favours neither side. The
first step of a block is not counted: what it waits for was decided by the block before.
"""

from __future__ import annotations

from statistics import median

FIRST = 32  # steps before the first trial: short answers are not tried on
BLOCK = 4
TRIAL = (False, True, True, False)  # blocks with and without prefetch
KEPT = 256  # steps between two trials; 8 steps of prefetch in so many cost 1 % if it costs a third


class PayOff:
    """Told how long each decode step took; says whether the next one shall prefetch."""

    def __init__(self) -> None:
        self.is_on = False
        self._until_trial = FIRST
        self._taken: dict[bool, list[float]] = {False: [], True: []}
        self._step_of_trial = 0

    def end_step(self, seconds: float) -> None:
        """A decode step took so long, with or without prefetch as `is_on` says."""
        if self._until_trial > 0:
            self._until_trial -= 1
            if self._until_trial == 0:
                self.is_on = TRIAL[0]
            return
        block, step = divmod(self._step_of_trial, BLOCK)
        if step > 0:
            self._taken[TRIAL[block]].append(seconds)
        self._step_of_trial += 1
        if self._step_of_trial < BLOCK * len(TRIAL):
            self.is_on = TRIAL[self._step_of_trial // BLOCK]
            return
        self.is_on = median(self._taken[True]) < median(self._taken[False])
        self._until_trial = KEPT
        self._taken = {False: [], True: []}
        self._step_of_trial = 0
