"""How near to float64 are our logits, and those of transformers in bfloat16?

    PYTHONPATH=. python benchmarks/nearness.py

The demo model and ten architectures, tiny and random, 8 sequences of 64 tokens: as one prompt, and
token by token, all of them given. The reference is stock transformers, eager, in float64, with the
same bfloat16 weights. Errors are in units of the root mean square of the reference's logits: their
root mean square and the largest, with transformers' bits (exact=True) and by default. The experts
that the reference chooses are imposed; the last column is the ratio where routers choose freely,
which near ties of routers decide.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from tests.float64 import ARCHITECTURES, DEMO, errors, save_tiny, text_for_demo

WAYS: dict[str, dict[str, Any]] = {"exact": {"exact": True}, "default": {}}


def print_rows(name: str, folder: Path, ids_BN: torch.Tensor) -> dict[str, float]:
    """The ratio of root mean squares, by "prompt" and "steps"."""
    found = errors(folder, ids_BN, WAYS, imposes_experts=True)
    free = errors(folder, ids_BN, WAYS, imposes_experts=False)
    ratios = {}
    for kind in ("prompt", "steps"):
        exact, ours = found["exact", kind], found["default", kind]
        ratios[kind] = ours.rms / exact.rms
        ratio_free = free["default", kind].rms / free["exact", kind].rms
        print(
            f"| {name} | {kind} | {exact.rms:.2%} | {ours.rms:.2%} | {ratios[kind]:.3f} "
            f"| {exact.largest:.1%} | {ours.largest:.1%} | {ratio_free:.3f} |",
            flush=True,
        )
    return ratios


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    print("| model | logits of | RMS, exact | default | ratio | largest, exact | default | free |")
    print("|---|---|---|---|---|---|---|---|")
    found = [print_rows("demo", DEMO, text_for_demo())]
    for name in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as scratch:
            ids_BN = save_tiny(name, Path(scratch))
            found.append(print_rows(name.removesuffix("ForCausalLM"), Path(scratch), ids_BN))
    for kind in ("prompt", "steps"):
        mean = math.exp(sum(math.log(ratios[kind]) for ratios in found) / len(found))
        print(f"geometric mean of the ratios, {kind}: {mean:.3f}")


if __name__ == "__main__":
    main()
