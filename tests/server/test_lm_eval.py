"""`lm_eval` gives the same scores by a server, in process and with stock transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_infinity import MoE
from tests.server.serving import serving

pytest.importorskip("lm_eval", reason="needs the extra `evaluate`")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.arithmetic]

ROOT = Path(__file__).resolve().parents[2]
DEMO = "models/demo"
TASKS = "moe_choice,moe_prose"
SETTINGS = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
METRICS = ("acc,none", "acc_norm,none", "word_perplexity,none", "bits_per_byte,none")
CLOSE = 1e-4  # of a sum of log-probabilities, two float32 arithmetics


def scored(out: Path, *command: str) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """The results by task, and by task what the model said to each document."""
    env = os.environ | SETTINGS | {"PYTHONPATH": str(ROOT), "HF_HOME": str(out / "home")}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = out.rglob("results_*.json")
    samples = {}
    for file in out.rglob("samples_*.jsonl"):
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        task = next(name for name in TASKS.split(",") if name in file.name)
        samples[task] = [row["filtered_resps"] for row in sorted(rows, key=lambda r: r["doc_id"])]
    return json.loads(results.read_text("utf-8"))["results"], samples


def by_command(out: Path, model: str, args: str, *more: str) -> Any:
    options = f"--model {model} --model_args {args} --tasks {TASKS} --log_samples"
    place = f"--include_path examples/evaluation --output_path {out}"
    return scored(out, "-m", "lm_eval", *options.split(), *place.split(), *more)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return by_command(tmp_path_factory.mktemp("stock"), "hf", f"pretrained={DEMO},dtype=float32")


def assert_same_scores(found: Any, expected: Any) -> None:
    (results, samples), (stock, stock_samples) = found, expected
    assert samples.keys() == stock_samples.keys() == set(TASKS.split(","))
    for task, documents in stock_samples.items():
        assert_near(samples[task], documents)
        metrics = [name for name in METRICS if name in stock[task]]
        assert len(metrics) == 2
        assert_near(
            [results[task][name] for name in metrics], [stock[task][name] for name in metrics]
        )


def assert_near(found: Any, expected: Any) -> None:
    """Of lists of whatever: numbers nearly, all else exactly."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_near(one, other)
    elif isinstance(expected, str | float) and str(expected) not in ("True", "False"):
        assert float(found) == pytest.approx(float(expected), rel=CLOSE)
    else:
        assert found == expected


@pytest.mark.parametrize(("batch_size", "num_concurrent"), [(1, 1), (4, 1), (1, 4)])
def test_a_server_scores_as_stock_transformers_does(expected, tmp_path, batch_size, num_concurrent):
    with (
        MoE(ROOT / DEMO, host_memory="25%", dtype="float32") as moe,
        serving(moe, served_name=DEMO, max_batch=4, prefill_chunk=32) as server,
    ):
        url = f"model={DEMO},base_url={server.url}/v1/completions,max_length=1024"
        args = f"{url},num_concurrent={num_concurrent}"
        found = by_command(tmp_path, "local-completions", args, "--batch_size", str(batch_size))
    assert_same_scores(found, expected)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_loaded_model_scores_as_stock_transformers_does(expected, tmp_path, batch_size):
    options = f"--tasks {TASKS} --dtype float32 --batch-size {batch_size} --output-path {tmp_path}"
    found = scored(tmp_path, "examples/lm_eval_offloaded.py", DEMO, *options.split())
    assert_same_scores(found, expected)


def test_another_model_has_other_scores(expected):
    """The comparison can fail."""
    results, samples = expected
    swapped = {task: documents[::-1] for task, documents in samples.items()}
    with pytest.raises(AssertionError):
        assert_same_scores((results, swapped), expected)
