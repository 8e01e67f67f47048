"""How near are our logits, and those of llama.cpp, to the exact ones of the same GGUF file?

    PYTHONPATH=. python benchmarks/gguf_nearness.py --llama-python PYTHON

The demo model in several types, 8 sequences of 64 tokens, each as one prompt. The reference has the
weights that gguf's `dequantize` gives, and computes in float32. llama.cpp rounds activations to 8
bits, and its cache to float16; we round to --dtype between layers. Errors are shares of the root
mean square of the reference's logits of a token: the median over tokens, the root mean square over
all of them, and how often the likeliest token is another. Where a router's choice is nearly a tie,
any rounding may change it: that shows in the second.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from moe_infinity import MoE
from tests.float64 import DEMO, text_for_demo
from tests.gguf_files import widen
from tools.convert_to_gguf import convert

TYPES = ("bf16", "q8_0", "q4_0")


def ours(file: Path, ids_BN: Tensor, **options: object) -> Tensor:
    with MoE(file, config_from=str(DEMO), device="cpu", **options) as moe, torch.no_grad():
        return torch.cat([moe.model(ids_N[None]).logits.float() for ids_N in ids_BN])


def llama_cpp(python: str, file: Path, ids_BN: Tensor, scratch: Path) -> Tensor:
    np.save(scratch / "ids.npy", ids_BN.numpy())
    script = str(Path(__file__).with_name("llama_logits.py"))
    places = [str(file), str(scratch / "ids.npy"), str(scratch / "logits.npy")]
    subprocess.run([python, script, *places], check=True, stderr=subprocess.DEVNULL)
    return torch.from_numpy(np.load(scratch / "logits.npy"))


def print_row(wanted: str, name: str, found_BNV: Tensor, exact_BNV: Tensor) -> None:
    error_BN = (found_BNV - exact_BNV).square().mean(-1).sqrt()
    error_BN = error_BN / exact_BNV.square().mean(-1).sqrt()
    other = (found_BNV.argmax(-1) != exact_BNV.argmax(-1)).float().mean()
    rms = error_BN.square().mean().sqrt()
    print(f"| {wanted} | {name} | {error_BN.median():.3%} | {rms:.2%} | {other:.1%} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--llama-python", required=True)
    given = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    ids_BN = text_for_demo()
    print("| type | computed by | error, median | root mean square | another token |")
    print("|---|---|---|---|---|")
    for wanted in TYPES:
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            file = scratch / f"{wanted}.gguf"
            convert(DEMO, file, wanted)
            exact = ours(widen(file, scratch / "wide.gguf"), ids_BN, dtype="float32", exact=True)
            for dtype in ("bfloat16", "float32"):
                print_row(wanted, f"ours, {dtype}", ours(file, ids_BN, dtype=dtype), exact)
            theirs = llama_cpp(given.llama_python, file, ids_BN, scratch)
            print_row(wanted, "llama.cpp", theirs, exact)


if __name__ == "__main__":
    main()
