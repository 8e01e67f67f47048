"""`make test-transformers`: models of transformers' own tests go through the backend, and failures
that are only there are told from the rest.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import transformers_suite
from scripts.transformers_suite import Outcome, failing_only_in, run, table

# Written like transformers' tests, which take whatever a call of a class or from_pretrained gives.
SUITE = """
import copy, tempfile, unittest
from transformers import MixtralConfig, MixtralForCausalLM, MixtralModel

SIZES = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
SIZES |= dict(num_attention_heads=2, num_key_value_heads=2, num_local_experts=4)

def has_experts(model):
    return any("experts" in name for name, _ in model.named_parameters())

class Test(unittest.TestCase):
    def test_made(self):
        config = MixtralConfig(**SIZES, attn_implementation="eager")
        self.assertTrue(has_experts(MixtralForCausalLM(config)))

    def test_loaded(self):
        model = MixtralForCausalLM(MixtralConfig(**SIZES))
        self.assertTrue(model.training)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded, info = MixtralForCausalLM.from_pretrained(
                folder, output_loading_info=True, attn_implementation="eager"
            )
        self.assertFalse(info["missing_keys"])
        self.assertEqual(loaded.config._attn_implementation, "eager")
        self.assertEqual(type(loaded).__name__, "MixtralForCausalLM")
        loaded.set_experts_implementation("eager")

    def test_base(self):
        self.assertTrue(has_experts(copy.deepcopy(MixtralModel(MixtralConfig(**SIZES)))))

    def test_two_experts(self):
        MixtralForCausalLM(MixtralConfig(**(SIZES | dict(num_local_experts=2))))

    def test_training(self):
        raise AssertionError("left out")

    def test_fails_anyway(self):
        raise AssertionError("in stock, too")

    def test_of_parts(self):
        for part in range(2):
            with self.subTest(part=part):
                model = MixtralForCausalLM(MixtralConfig(**SIZES))
                self.assertTrue(part or has_experts(model))

class Another(unittest.TestCase):
    def test_made(self):
        raise AssertionError("in stock, too, and no excuse for the other one")
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_fails_only_through_the_backend_is_found(tmp_path: Path):
    tests = tmp_path / "tests" / "models" / "mixtral"
    tests.mkdir(parents=True)
    (tests / "test_modeling_mixtral.py").write_text(SUITE)
    stock = run(tmp_path, "mixtral", None)
    assert [name for name, outcome in stock.items() if not outcome.is_passed] == [
        "Test.test_fails_anyway",
        "Another.test_made",
    ]
    assert not any(outcome.num_loaded for outcome in stock.values())
    ours = run(tmp_path, "mixtral", "exact")
    assert ours.keys() == stock.keys()
    assert ours["Test.test_loaded"].num_loaded == 2
    assert ours["Test.test_two_experts"].num_loaded == 1
    assert ours["Test.test_base"].num_loaded == 0
    found = failing_only_in(ours, stock)
    assert found.keys() == {"Test.test_made", "Test.test_loaded", "Test.test_of_parts"}
    assert "UnsupportedModelError" in found["Test.test_loaded"]


def test_tests_of_another_version_are_an_error(tmp_path, monkeypatch, capsys):
    """None can be imported: nothing would fail only through the backend."""
    (tmp_path / "tests" / "models" / "mixtral").mkdir(parents=True)
    monkeypatch.setattr(transformers_suite, "run", lambda *_: {"tests": Outcome(False, "", 0)})
    monkeypatch.setattr(sys, "argv", ["transformers_suite", str(tmp_path), "mixtral"])
    with pytest.raises(SystemExit) as ended:
        transformers_suite.main()
    assert ended.value.code == 2
    assert "no test of mixtral passes" in capsys.readouterr().err


def test_only_tests_that_stock_passes_count():
    passed, failed = Outcome(True, "", 1), Outcome(False, "NaN", 1)
    stock = {"a": passed, "b": failed, "c": passed}
    ours = {"a": failed, "b": failed, "c": passed}
    assert failing_only_in(ours, stock) == {"a": "NaN"}


def test_a_refusal_by_name_is_told_from_a_fault():
    text = table(
        {("a", "exact", "NaN"): ["olmoe", "dbrx"], ("b", "exact", "UnsupportedModelError: x"): []}
    )
    assert "FAILS  a (exact): olmoe dbrx\n    NaN" in text
    assert "refused  b (exact)" in text
