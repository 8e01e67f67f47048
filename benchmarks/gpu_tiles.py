"""Would other tiles read experts from device memory faster than those of kernels/cuda/experts.py?

One constant at a time is given another value; microseconds of a layer, and how many times as fast
as with the constants as they are. What GPUs of other sizes want may differ: rows name the device.

    python benchmarks/gpu_tiles.py [--kinds bf16,int4] [--tokens 1] [--rounds 7] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_kernels import KINDS, Layers, Sizes, captured_us, ceilings, gbps

OTHERS = {
    "UP_LOADS": (128, 512),
    "UP_WARPS": (2, 8),
    "DOWN_LOADS": (1024, 2048),
    "DOWN_WARPS": (2, 8),
    "MAX_CHUNKS": (64,),
    "MAX_ROWS": (8, 32),
}
OF_AWQ = {"AWQ_ROWS": (16, 64), "AWQ_WARPS": (2, 8)}


def rows_of(sizes: Sizes, rounds: int, read_gbps: float) -> Iterator[dict[str, Any]]:
    from moe_infinity.kernels.cuda import experts as triton_experts

    layers = Layers(sizes)
    num_bytes = sizes.num_layers * layers.num_pairs * layers.expert_bytes
    told = {"kind": sizes.kind, "tokens": sizes.num_tokens}

    def timed() -> dict[str, float]:
        us = captured_us(lambda: layers.step(machinery=False), rounds)
        return {"us": us / sizes.num_layers, "share": gbps(num_bytes, us) / read_gbps}

    usual, usual_tiles = timed(), tiles_of(layers)
    yield told | usual
    others = OF_AWQ if sizes.kind == "awq" else OTHERS
    for name, value in ((name, value) for name, values in others.items() for value in values):
        assert hasattr(triton_experts, name), name
        row = told | {name: value}
        with mock.patch.dict(vars(triton_experts), {name: value}):
            if tiles_of(layers) == usual_tiles:
                continue
            try:
                found = timed()
            except Exception as error:  # a tile may need more registers or memory than there are
                yield row | {"failed": f"{type(error).__name__}: {error}"[:200]}
                continue
        yield row | found | {"times": usual["us"] / found["us"]}


def tiles_of(layers: Layers) -> tuple[Any, ...]:
    """All that the constants decide."""
    from moe_infinity.kernels.cuda import experts as tiles

    up = tiles.tile_of(layers.mlp.gate, tiles.UP_LOADS, tiles.UP_WARPS)
    down = tiles.tile_of(layers.mlp.down, tiles.DOWN_LOADS, tiles.DOWN_WARPS)
    return *up.values(), *down.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="JSON, a row in each line")
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"unknown kinds: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    read_gbps, device = ceilings(args.rounds)["read_gbps"], torch.cuda.get_device_name()
    for kind in kinds:
        for row in rows_of(Sizes(kind=kind, num_tokens=args.tokens), args.rounds, read_gbps):
            told = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
            line = json.dumps({"device": device, "read_gbps": round(read_gbps), **told})
            print(line, flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
