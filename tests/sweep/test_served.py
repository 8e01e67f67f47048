"""The server gives every architecture's requests what generate() gives for each of them alone."""

from __future__ import annotations

import pytest
from transformers import GenerationMixin

from tests.sweep import served
from tests.sweep.discover import architectures_in
from tests.sweep.overrides import NOT_COMPARED

pytestmark = pytest.mark.arithmetic

# Beside what tests/server tries: lengths that a model computes otherwise.
FAST = {
    ("phimoe", "longrope"): "drops its cache where its answer grows long",
    ("qwen3_moe", "dynamic"): "has another rotary embedding at every length",
    ("llama4", "own"): "counts positions in the padded cache; attention in chunks",
}
FAST_OPTIONS = ("chunks", "prefixes")
# Why some are not served, in chunks, in batches or behind prefixes.
REFUSALS = (
    "not served: the caches of this model cannot be put together",
    "not served: prefixes of this model cannot be kept",
    "not served: encoder-decoder models",
    "not served: a model with a cache of its own",
)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("folder", "rope"), FAST)
def test_lengths_that_a_model_computes_otherwise_change_no_answer(folder, rope, tmp_path):
    architecture = architectures_in(folder)[-1]
    served.save(architecture, served.with_lengths(architecture, rope), tmp_path)
    assert list(served.differences(tmp_path, rope, FAST_OPTIONS)) == []


@pytest.mark.slow
@pytest.mark.sweep(())
@pytest.mark.parametrize("rope", served.ROPES)
def test_requests_together_get_what_each_gets_alone(folder, rope, tmp_path):
    for architecture in architectures_in(folder):
        has_own = architecture.model_class.generate is not GenerationMixin.generate
        if has_own or architecture.name in NOT_COMPARED:
            continue
        checkpoint = tmp_path / architecture.name
        try:
            config = served.with_lengths(architecture, rope)
            if config is None:
                continue
            served.save(architecture, config, checkpoint)
            found = list(served.differences(checkpoint, rope))
        except Exception:  # each class of transformers refuses an embedding in its own way
            if rope == "own":
                raise
            continue
        wrong = [line for line in found if not any(reason in line for reason in REFUSALS)]
        assert wrong == [], architecture.name
