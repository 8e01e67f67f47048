"""Quantize a GGUF file with llama.cpp's own quantizer.

python tools/quantize_gguf.py MODEL.gguf OUT.gguf q4_0          # needs llama-cpp-python
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import llama_cpp

TYPES = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantize a GGUF file as llama.cpp does")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("type", choices=TYPES)
    args = parser.parse_args()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = TYPES[args.type]
    params.nthread = len(os.sched_getaffinity(0))
    model, out = str(args.model).encode(), str(args.out).encode()
    if status := llama_cpp.llama_model_quantize(model, out, params):
        raise SystemExit(f"llama.cpp cannot quantize {args.model}: status {status}")


if __name__ == "__main__":
    main()
