"""Run transformers' own tests of models with routed experts, as they are and through the backend,
and print what fails only through the backend.

    python -m scripts.transformers_suite SOURCE [MODEL ...] [--form default] [--form exact]

SOURCE is a folder with transformers' repository at the tag of the installed version; a MODEL is a
folder of its tests/models. Without one, all are run that have routed experts: hours. The exit code
is 1 if anything fails only through the backend.

A failure is "refused" if its message names something that a model whose experts are not in memory
does not do, such as another experts implementation.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import transformers

from scripts.through_backend import FORMS
from tests.sweep.discover import modelling_files

ROOT = Path(__file__).resolve().parents[1]
# Words in the names of tests about other things than what a model computes, and of those that look
# for the experts among its parameters.
LEFT_OUT = (
    *("training", "grad", "offload", "parallel", "deepspeed", "compile", "flash", "flex", "export"),
    *("init_weights", "tp_plan", "missing_tied_weights", "torch_save"),
)
TIMEOUT_S = 300  # of one test
REFUSAL = "UnsupportedModelError"


class Outcome(NamedTuple):
    """What became of one test case."""

    is_passed: bool
    message: str  # of a failure, its first line
    num_loaded: int  # models that went through the backend


PASSED = Outcome(True, "", 0)
Outcomes = dict[str, Outcome]  # by the class and the name of the test


def run(source: Path, model: str, form: str | None) -> Outcomes:
    """Run the tests of one folder; `form` is None for stock transformers."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-n", "2"]
        command += ["-p", "no:cacheprovider", "-p", "scripts.through_backend"]
        command += ["--timeout", str(TIMEOUT_S), "--junitxml", str(results)]
        command += ["-k", " and ".join(f"not {word}" for word in LEFT_OUT)]
        command += [] if form is None else ["--through-backend", form]
        finished = subprocess.run(
            [*command, f"tests/models/{model}"],
            cwd=source,
            env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if not results.exists():
            raise SystemExit(f"{finished.stdout}\nthe tests of {model} did not start")
        return outcomes(results)


def outcomes(results: Path) -> Outcomes:
    """Read what pytest wrote with --junitxml."""
    found: Outcomes = {}
    for case in ElementTree.parse(results).iter("testcase"):
        failures = [part for part in case if part.tag in ("failure", "error")]
        is_passed = not failures and case.find("skipped") is None
        message = failures[0].get("message", "").partition("\n")[0] if failures else ""
        loaded = [p.get("value", "0") for p in case.iter("property")]
        name = f"{case.get('classname', '').rpartition('.')[2]}.{case.get('name', '')}"
        if found.get(name, PASSED).is_passed:  # subtests have the name of their test
            found[name] = Outcome(is_passed, message, sum(map(int, loaded)))
    return found


def failing_only_in(ours: Outcomes, stock: Outcomes) -> dict[str, str]:
    """The messages of tests that pass in `stock` and fail in `ours`."""
    passed = [name for name, outcome in stock.items() if outcome.is_passed]
    return {name: ours[name].message for name in passed if not ours[name].is_passed}


def table(failures: Mapping[tuple[str, str, str], Iterable[str]]) -> str:
    """Lines of (test, form, message) and the models that it happens in."""
    rows = [
        f"{'refused' if REFUSAL in message else 'FAILS'}  {test} ({form}): "
        f"{' '.join(models)}\n    {message}"
        for (test, form, message), models in sorted(failures.items())
    ]
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("source", type=Path, help="a folder with transformers' repository")
    parser.add_argument("models", nargs="*", help="folders of its tests/models")
    parser.add_argument("--form", action="append", choices=FORMS, help="how MoE loads models")
    given = parser.parse_args()
    folder = given.source / "tests" / "models"
    if not folder.is_dir():
        parser.error(f"{folder} is no folder")
    models = given.models or [name for name in modelling_files() if (folder / name).is_dir()]
    failures: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for model in models:
        stock = run(given.source, model, None)
        num_passed = sum(outcome.is_passed for outcome in stock.values())
        if not num_passed:
            parser.error(
                f"no test of {model} passes without the backend\n"
                f"hint: is {given.source} that of transformers {transformers.__version__}?"
            )
        for form in given.form or FORMS:
            ours = run(given.source, model, form)
            num_loaded = sum(outcome.num_loaded for outcome in ours.values())
            found = failing_only_in(ours, stock)
            print(
                f"{model}, {form}: stock passes {num_passed}, {len(found)} of them fail, "
                f"{num_loaded} models went through the backend",
                flush=True,
            )
            for test, message in found.items():
                failures[test.partition(".")[2], form, message].append(model)
    print(f"transformers {transformers.__version__}\n{table(failures)}")
    return int(any(REFUSAL not in message for _, _, message in failures))


if __name__ == "__main__":
    sys.exit(main())
