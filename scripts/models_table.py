"""Run the sweep over all architectures of the installed transformers and write docs/models.md.

    python -m scripts.models_table [--check]

With --check nothing is written, and the exit code is 1 if the page differs from what the sweep
finds. A page made with another version of transformers is out of date.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
import transformers

from tests.sweep.compare import Row, rows_of
from tests.sweep.discover import modelling_files

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN = "<!-- sweep: begin (python -m scripts.models_table) -->"
END = "<!-- sweep: end -->"
NEW_PAGE = f"""# Supported models

Every class of transformers that generates and has routed experts, found by `tests/sweep`: a tiny
random model is saved in the layout its architecture is published in, run by stock transformers, and
run from the same checkpoint with `exact=True` and as few expert slots as there are MoE layers.
*bitwise*: the logits of the prompt and of the steps after it are equal bit for bit, and no longer
are when two experts of any one MoE layer change places.

{BEGIN}
{END}
"""


def sweep() -> list[Row]:
    """The rows of the table by model type."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = []
    for folder in modelling_files():
        with tempfile.TemporaryDirectory() as scratch:
            for row in rows_of(folder, Path(scratch)):
                print(f"{row.model_type}: {row.result}", file=sys.stderr)
                rows.append(row)
    return sorted(rows, key=lambda row: (row.model_type, row.model_class))


def as_markdown(rows: list[Row]) -> str:
    lines = [
        f"transformers {transformers.__version__}: {summary(rows)}.",
        "",
        "| model type | class | experts class | result |",
        "|---|---|---|---|",
    ]
    for row in rows:
        result = f"{row.result}: {row.reason}" if row.reason else row.result
        cells = row.model_type, row.model_class, row.experts_class, result.replace("|", "/")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """One line for the README: how many architectures are supported."""
    generating = [row for row in rows if row.result != "not generating"]
    supported = [row for row in generating if row.is_supported]
    bitwise = [row for row in supported if row.result == "bitwise"]
    return (
        f"{len(supported)} of {len(generating)} generating classes with routed experts run "
        f"offloaded, {len(bitwise)} of them bit for bit"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if out of date")
    is_check = parser.parse_args().check
    page = PAGE.read_text("utf-8") if PAGE.exists() else NEW_PAGE
    if is_check and f"transformers {transformers.__version__}:" not in page:
        print(f"{PAGE.name} is not of transformers {transformers.__version__}", file=sys.stderr)
        return 1
    rows = sweep()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    fresh = f"{before}{BEGIN}\n{as_markdown(rows)}\n{END}{after}"
    print(summary(rows))
    if is_check and fresh != page:
        print(f"{PAGE.name} is out of date: python -m scripts.models_table", file=sys.stderr)
        return 1
    if not is_check:
        PAGE.write_text(fresh, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
