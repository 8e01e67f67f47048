"""One number for the memory of this process, and who gives way when a step needs more of it.

    the number = Python, dense weights, KV caches, prefixes, what a step needs + slots of experts

All but the slots comes and goes with requests, so slots give way: before a step that needs their
memory some are given back to the system, and later steps take them again.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import NamedTuple

import numpy as np

from moe_infinity.architectures.prompt_blocks import PromptBlocks
from moe_infinity.errors import ConfigError
from moe_infinity.experts import Phase, Step
from moe_infinity.memory.needs import MASK_BYTES, StepBytes
from moe_infinity.memory.slots import HostSlots, MappedSlots
from moe_infinity.memory.tiers import SlotTier
from moe_infinity.sizes import format_bytes
from moe_infinity.system import linux
from moe_infinity.system.machine import available_memory_bytes, machine_memory_bytes, own_bytes
from moe_infinity.system.memory import return_free_memory

logger = logging.getLogger(__name__)

# What is left alone of the memory of the machine, or of the limit of our control group: for the
# kernel's page tables, and for what other programs take between two looks at it.
MARGIN_SHARE = 1 / 32
LEAST_MARGIN_BYTES = 128 << 20
LEAST_SLOTS_DIVISOR = 8  # so many of all slots stay, whatever steps need
SPARE_SHARE = 1 / 32  # stays free when slots are taken again, so that they do not go to and fro
FIRST_PASS_BYTES = 192 << 20  # heaps and scratch of threads, that stay; measured, 600 tokens
FIXED_SHARE = 0.7  # of what is free, for experts whose slots cannot give way: a convention
DECODE_STEPS = 16  # from one look at the memory to the next, which takes a fifth of a millisecond
LEAST_TOKENS = 32  # of a pass over a prompt
# Tokens of a block, best first: others only where experts would be read again otherwise. With the
# widths of Qwen3-30B-A3B, 8,000 tokens took 38, 42, 45 and 37 s with the first four.
BLOCK_SIZES = (2048, 1024, 512, 4096, 8192)


def margin_of(machine_bytes: int) -> int:
    """The bytes that are left alone of so many."""
    return max(int(machine_bytes * MARGIN_SHARE), LEAST_MARGIN_BYTES)


class ProcessMemory:
    """The bytes that this process may take."""

    def __init__(self, num_bytes: int | None, *, in_page_cache: int = 0) -> None:
        """None: those that it has and those that are free. `in_page_cache` are bytes of files that
        count as free, and are used all the time. Raises ConfigError for more than the machine has,
        and NotTold.
        """
        machine_bytes = machine_memory_bytes()
        self._margin = margin_of(machine_bytes)
        if num_bytes is not None and num_bytes > machine_bytes:
            raise ConfigError(
                f"memory of {format_bytes(num_bytes)} is more than this machine has "
                f"({format_bytes(machine_bytes)})"
            )
        if num_bytes is None:
            num_bytes = own_bytes() + available_memory_bytes() - self._margin
        self.num_bytes = num_bytes
        self._in_page_cache = in_page_cache

    def left(self) -> int:
        """The bytes that it may still take; below 0 if it or another program took too many."""
        left = min(self.num_bytes - own_bytes(), available_memory_bytes() - self._margin)
        return left - self._in_page_cache


class PassPlan(NamedTuple):
    """How to compute a pass over a prompt."""

    num_again: int  # experts that are read once more, for another block
    num_read: int  # experts that are read, these among them
    num_given: int  # slots that give way to it
    block: int | None  # tokens that a layer computes at once; None: all


class Room:
    """Gives slots back for the steps that need their memory, and takes them again."""

    def __init__(
        self,
        memory: ProcessMemory,
        needs: StepBytes | None,
        tier: SlotTier,
        *,
        num_experts: int,
        num_layers: int,
        blocks: PromptBlocks | None = None,
    ) -> None:
        """`tier` is the one that is filled from disk, with `num_experts` experts of `num_layers`
        layers. `needs` is None if steps compute in other memory, that of a GPU: then nothing here
        bounds them. `blocks`: those that layers may take of long prompts.
        """
        self.deciding = RLock()  # held by the thread that decides about slots
        self.memory = memory
        self.needs = needs
        self._tier = tier
        # Those of a GPU are page-locked. Experts in the page cache leave by themselves.
        self._can_give_back = (
            needs is not None and isinstance(tier.slots, HostSlots) and linux.is_linux()
        )
        self._num_experts = num_experts
        self._num_layers = num_layers
        self._blocks = blocks
        if blocks is not None:
            blocks.make_room = self.make_for_whole
        self.keeps_windows = False  # a pass over a prompt keeps what windows pass over, too
        self._num_unseen = 0  # decode steps since the last look
        self._set_aside_bytes = 0  # that a pass under way takes again
        self._first_pass_bytes = min(FIRST_PASS_BYTES, memory.num_bytes // 16)

    def left(self) -> int:
        """The bytes that are neither taken nor promised to slots or to a pass under way."""
        return self.memory.left() - self._tier.bytes_to_come - self._set_aside_bytes

    @contextmanager
    def set_aside(self, step: Step) -> Iterator[None]:
        """Inside, other steps may run between two layers of this one. What a layer frees is the
        next one's afterwards: no slot comes back there. What stays between layers is taken already.
        """
        before = self._set_aside_bytes
        if self.needs is not None:
            size = (None if self._blocks is None else self._blocks.size_now) or step.num_tokens
            at_once = min(step.num_tokens, size)
            self._set_aside_bytes += self.needs.of_pass(at_once, step.context)
        try:
            yield
        finally:
            self._set_aside_bytes = before

    def _trim_for(self, num_bytes: float) -> None:
        """Give what the process has freed back to the system if fewer bytes than these are left.
        The C library keeps it otherwise: 0.1 to 0.7 GB of 4 after prompts of 2,000 tokens each.
        """
        if self.left() < num_bytes:
            return_free_memory()

    def movable(self) -> int:
        """The bytes that slots could leave. Experts in the page cache leave by themselves."""
        return self._num_movable * self._tier.slots.slot_bytes

    def make(self, step: Step) -> None:
        """Before a pass: give back the slots whose memory it needs, or take some of them again."""
        if self.needs is None:
            return
        num_tokens = step.num_tokens
        slots_return = step.phase is Phase.DECODE
        if step.phase is Phase.PREFILL:
            size = self._choose_block(step)
            slots_return = size is not None  # blocks need those of a layer together
            needs = self.needs.of_pass(num_tokens, step.context, size) + self._first_pass_bytes
            needs += self._keys_of_pass(num_tokens)
            if step.counted_T is not None:  # a mask of all pairs says what is padding
                needs += num_tokens * step.context * MASK_BYTES
            self._first_pass_bytes = 0
            self._num_unseen = -1  # the next decode step looks: slots may come back
        else:
            # After a prompt, keys and values are copied to where there is room for more. Those of
            # a layer or two are there twice for a while: half of all is enough for most models.
            num_copied = num_tokens * step.context // 2 if self._num_unseen < 0 else 0
            self._num_unseen = (self._num_unseen + 1) % DECODE_STEPS
            if self._num_unseen:
                return
            num_tokens *= DECODE_STEPS
            needs = self.needs.of_decode_step(num_tokens, max(step.context, num_tokens))
            needs += self.needs.kv.of(num_copied) + self.needs.kv.of(num_tokens)
        if self._tier.table.num_withdrawn:
            self._trim_for(math.inf)
        spare = self.keep_free(needs)
        if self._tier.table.num_withdrawn and slots_return:
            kept_free = int(self.memory.num_bytes * SPARE_SHARE)
            self._tier.table.restore(max(spare - kept_free, 0) // self._tier.slots.slot_bytes)

    def _keys_of_pass(self, num_tokens: int) -> int:
        """The bytes of the keys and values of so many tokens of a prompt."""
        assert self.needs is not None
        kv = self.needs.kv
        passed = max(num_tokens - kv.window, 0) if self.keeps_windows else 0
        return kv.of(num_tokens) + passed * kv.per_window_token

    def _choose_block(self, step: Step) -> int | None:
        """Choose how many tokens of a prompt layers take at once; None: all."""
        if self._blocks is None or self.needs is None:
            return None
        self._blocks.size = None
        is_of_one = len(np.unique(step.sequence_of_token_T)) == 1
        if is_of_one and self.takes_blocks(step.num_tokens):
            left = self.left() - self._keys_of_pass(step.num_tokens)
            plan = self._plan(step.num_tokens, step.context, left, may_cut=True)
            self._blocks.size = min(BLOCK_SIZES) if plan is None else plan.block
        return self._blocks.size

    def make_for_layer(self, num_tokens: int) -> None:
        """The same before a layer's experts compute so many tokens of a prompt, and the next layer
        after them: what was taken so far may be more than was thought.
        """
        if self.needs is not None:
            self.keep_free(num_tokens * self.needs.per_part)

    def make_for_whole(self, num_tokens: int) -> None:
        """The same before layers take all of so many tokens, which were to be taken in blocks."""
        if self.needs is not None:
            self.keep_free(num_tokens * self.needs.per_token)

    def make_for_keys(self, num_tokens: int) -> None:
        """The same before keys and values of so many tokens are copied. The next decode step copies
        them once more, to where there is room for more.
        """
        self._num_unseen = -1
        if self.needs is not None:
            self.keep_free(self.needs.kv.of(num_tokens))

    def keep_free(self, num_bytes: int) -> int:
        """Give back what the process has freed, and then slots, until so many bytes are free.
        Returns how many more there were before slots.
        """
        with self.deciding:  # not while the preloader takes a slot
            self._trim_for(num_bytes)
            spare = self.left() - num_bytes
            num_slots = min(math.ceil(-spare / self._tier.slots.slot_bytes), self._num_movable)
            slots = self._tier.slots
            if num_slots > 0 and self._can_give_back and isinstance(slots, HostSlots):
                slot_ids = self._tier.table.withdraw(num_slots)
                slots.give_back(slot_ids)
                given = format_bytes(len(slot_ids) * self._tier.slots.slot_bytes)
                logger.info("%s of experts make room for keys, values and activations", given)
            return spare

    @property
    def _num_movable(self) -> int:
        slots = self._tier.slots
        if not (self._can_give_back or isinstance(slots, MappedSlots)):
            return 0
        least = max(slots.num_slots // LEAST_SLOTS_DIVISOR, 1)
        return max(self._tier.table.num_slots - least, 0)

    def has_room(self, num_tokens: int, at_once: int = LEAST_TOKENS) -> bool:
        """True if so many tokens more may be kept, computed so many at once."""
        if self.needs is None:
            return True
        need = self.needs.of_pass(at_once, num_tokens) + self.needs.kv.of(num_tokens)
        self._trim_for(need - self.movable())
        return need <= self.left() + self.movable()

    def most_tokens(self, most: int, *, is_whole: bool) -> int:
        """How long a sequence may become, at most `most` tokens; with `is_whole` all of them are
        computed at once.
        """

        def is_too_long(length: int) -> bool:
            return not self.has_room(length, length if is_whole else LEAST_TOKENS)

        return bisect(range(1, most + 1), False, key=is_too_long)

    @property
    def has_all(self) -> bool:
        """True if each expert has a slot, and with a GPU: it reads prompts in short passes."""
        return self.needs is None or self._tier.table.num_slots == self._num_experts

    def tokens_at_once(
        self,
        num_new: int,
        context: int,
        most: int,
        *,
        is_one_sequence: bool = True,
        is_alone: bool = True,
    ) -> int:
        """How many of the last `num_new` of `context` tokens to compute in one pass, at most `most`
        or few. Each pass over a long prompt reads the absent experts, so there are as few as memory
        allows, unless that makes too many experts absent. 0 if not even a short pass fits. Unless
        `is_alone`, other sequences may go on in the pass: memory is left for their tokens.
        """
        if self.needs is None:
            return min(num_new, most)
        kept = self._keys_of_pass(num_new)
        kept += 0 if is_alone else int(self.memory.num_bytes * SPARE_SHARE)
        self._trim_for(self.needs.of_pass(min(num_new, most), context) + kept)
        left = self.left() - kept
        may_cut = is_one_sequence and self.takes_blocks(num_new)
        best = 0
        least_read = math.inf
        fewest = max(math.ceil(num_new / max(most, LEAST_TOKENS)), 1)
        for num_passes in range(fewest, math.ceil(num_new / LEAST_TOKENS) + 1):
            num_tokens = math.ceil(num_new / num_passes)
            plan = self._plan(num_tokens, context, left, may_cut=may_cut)
            if plan is not None and num_passes * plan.num_read + plan.num_given < least_read:
                best = num_tokens
                least_read = num_passes * plan.num_read + plan.num_given
        return best

    def limit_blocks(self, num_tokens: int | None) -> None:
        """Let layers take no more tokens of a long prompt at once, but for few, because others wait
        for each block; None: as many as are read fastest.
        """
        if self._blocks is not None:
            self._blocks.most = None if num_tokens is None else max(num_tokens, min(BLOCK_SIZES))

    @property
    def _block_sizes(self) -> list[int]:
        """Tokens of a block, best first."""
        most = None if self._blocks is None else self._blocks.most
        return list(dict.fromkeys(min(size, most or size) for size in BLOCK_SIZES))

    def takes_blocks(self, num_tokens: int) -> bool:
        """True if layers take a pass of so many tokens of a prompt in blocks."""
        is_long = num_tokens > self._block_sizes[0]
        return is_long and self._blocks is not None and self._blocks.are_usable()

    def _plan(self, num_tokens: int, context: int, left: int, *, may_cut: bool) -> PassPlan | None:
        """The plan of a pass of so many tokens that reads the fewest experts again, with so many
        bytes left; None if there is no room for any. A layer whose experts have no room together
        reads some of them again for each block.
        """
        assert self.needs is not None
        in_blocks = may_cut and num_tokens > self._block_sizes[0]
        num_slots = self._tier.table.num_slots
        num_withdrawn = self._tier.table.num_withdrawn if in_blocks else 0
        per_layer = self._num_experts / self._num_layers
        plans = []
        for block in [s for s in self._block_sizes if s < num_tokens] if in_blocks else [None]:
            short = self.needs.of_pass(num_tokens, context, block) - left
            num_given = max(math.ceil(short / self._tier.slots.slot_bytes), 0)
            num_restored = min(max(-short // self._tier.slots.slot_bytes, 0), num_withdrawn)
            num_more = 0 if block is None else math.ceil(num_tokens / block) - 1
            num_short = max(per_layer - (num_slots - num_given + num_restored), 0)
            num_again = math.ceil(num_more * self._num_layers * num_short)
            num_read = self._num_experts - num_slots + num_given + num_again
            if num_given <= self._num_movable:
                plans.append(PassPlan(num_again, num_read, num_given, block))
        return min(plans, key=lambda plan: plan.num_again, default=None)
