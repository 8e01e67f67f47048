"""The bundled model: small, trained, and the same whether its experts are cached or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

pytestmark = pytest.mark.arithmetic

DEMO = Path(__file__).resolve().parents[1] / "models" / "demo"
PROMPT = "Question: What are the symptoms of a fever?\nAnswer:"


@pytest.fixture(scope="module")
def stock_tokens() -> list[int]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype="auto")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.sample(3)
@pytest.mark.grid
@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("host_memory", ["5%", "25%", "100%"])
def test_run_exact_gives_the_tokens_of_stock(command, stock_tokens, host_memory, policy):
    outcome = command(
        *("run", str(DEMO), "-p", PROMPT, "--max-new-tokens", "64", "--json"),
        *("--host-memory", host_memory, "--policy", policy, "--exact"),
    )
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["token_ids"] == stock_tokens


def test_the_whole_folder_is_at_most_26_megabytes():
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= 26_000_000


def test_the_model_is_trained_better_than_bigrams_in_every_domain():
    """As its evaluation says; a check of one sentence keeps that from going stale."""
    evaluation = json.loads((DEMO / "evaluation.json").read_text())
    for name, domain in evaluation["quality"].items():
        assert domain["loss"] < domain["bigram"], name
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    ids = tokenizer("She looked at him, and he said that he had been there.", return_tensors="pt")
    with torch.no_grad():
        loss = model(**ids, labels=ids["input_ids"]).loss.item()
    assert loss < 5.0  # untrained: ln 6144 = 8.7; unigrams: 7.2
