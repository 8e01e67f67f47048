"""`run --prompt-store`: a later command begins behind the prompt of an earlier one."""

from __future__ import annotations

import json

from tests.server.driving import words

TEXT = [(7 * at * at + at) % 120 + 3 for at in range(330)]


def test_a_second_run_computes_what_is_new(command, tiny_checkpoint, tmp_path):
    store = tmp_path / "store"
    arguments = ["run", tiny_checkpoint, "--dtype", "float32", "--max-new-tokens", 6, "--json"]
    found = []
    for num_tokens, more in ((300, [store]), (300, [store]), (330, [store]), (330, ["off"])):
        prompt = words(TEXT[:num_tokens])
        outcome = command(*arguments, "-p", prompt, "--prompt-store", *more)
        assert outcome.code == 0, outcome.err
        result = json.loads(outcome.out)
        found.append((result["token_ids"], result["report"]["prefill"]["tokens"]))
    assert [num_computed for _, num_computed in found] == [299, 11, 41, 330]
    assert found[0][0] == found[1][0]
    assert found[2][0] == found[3][0]


def test_a_mistyped_size_is_an_error_before_the_model_is_opened(command, tmp_path):
    outcome = command("run", tmp_path, "-p", "w5", "--prompt-store-size", "much")
    assert outcome.code == 1
    assert "'much' is not a size" in outcome.err


def test_a_folder_that_cannot_be_is_a_warning(command, tiny_checkpoint, caplog):
    prompt = words(TEXT[:300])
    arguments = ["run", tiny_checkpoint, "--dtype", "float32", "--max-new-tokens", 6, "-p", prompt]
    expected = command(*arguments)
    found = command(*arguments, "--prompt-store", "/dev/null/store")
    assert (found.code, found.out) == (0, expected.out)
    assert "the prompt store /dev/null/store" in caplog.text
