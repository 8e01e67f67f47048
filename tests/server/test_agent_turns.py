"""Ten turns of an agent with a model that has recurrent layers, one with an edited past."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_infinity import MoE
from moe_infinity.prefixes.prefix_cache import LEAST_TOKENS
from moe_infinity.prefixes.prefix_tree import BLOCK
from tests.conftest import save_tokenizer
from tests.server.driving import answered, assert_same_answer, cached, make_engine
from tests.sweep import tiny
from tests.sweep.discover import architectures_in

pytestmark = [pytest.mark.arithmetic, pytest.mark.slow]

END = 2  # ends a message
SYSTEM, USER, TOOL, ASSISTANT, THINK = range(3, 8)
NUM_TURNS = 10
EDITED = 6  # in this turn the client cuts and changes what a tool gave in turn 2
CONTINUING = ["qwen3_next", "qwen3_5_moe", "granitemoehybrid", "lfm2_moe", "nemotron_h"]


def text(seed: int, length: int) -> list[int]:
    return [(at * at * (seed + 3) + 5 * at + seed) % 110 + 10 for at in range(length)]


def message(role: int, content: list[int]) -> list[int]:
    return [role, *content, END]


class Agent:
    """A conversation whose template shows answers without what was thought, as those of Qwen do."""

    def __init__(self) -> None:
        self.messages = [message(SYSTEM, text(0, 400)), message(USER, text(1, 60))]

    @property
    def prompt(self) -> list[int]:
        return [*(token for each in self.messages for token in each), ASSISTANT, THINK]

    def go_on(self, turn: int, answer: list[int]) -> None:
        self.messages.append(message(ASSISTANT, answer[2:]))
        self.messages.append(message(TOOL, text(turn + 2, 260 + 10 * turn)))
        if turn + 1 == EDITED:
            cut = self.messages[7]
            assert cut[0] == TOOL
            self.messages[7] = [*cut[:100], *text(50, 40), END]


@pytest.fixture(scope="module", params=CONTINUING)
def hybrid(request, tmp_path_factory) -> Iterator[MoE]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(tiny.SIZES, "max_position_embeddings", 8192)
        model = tiny.tiny_model(architectures_in(request.param)[-1])
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    with MoE(folder, host_memory="50%", dtype="float32") as moe:
        moe.model.generation_config.eos_token_id = END
        yield moe


def num_shared(one: list[int], other: list[int]) -> int:
    """With how many equal tokens two prompts begin."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def test_a_turn_costs_what_is_new_in_it_and_an_edit_what_comes_behind_it(hybrid):
    """Of what the last turn had, only the answer's first tokens are shown otherwise later."""
    engine = make_engine(hybrid, max_batch=2, prefix_cache="256MiB")
    without = make_engine(hybrid, max_batch=2, prefix_cache="off")
    agent, before = Agent(), [0]
    for turn in range(NUM_TURNS):
        prompt = agent.prompt
        found, expected = (answered(each, prompt, max_new_tokens=4) for each in (engine, without))
        assert_same_answer(found, expected)
        num_new = len(prompt) - num_shared(before, prompt)
        num_more = len(prompt) - cached(found) - num_new
        assert 0 <= num_more < (BLOCK if turn < EDITED else LEAST_TOKENS + BLOCK), (turn, num_more)
        before = prompt
        agent.go_on(turn, found.token_ids)
