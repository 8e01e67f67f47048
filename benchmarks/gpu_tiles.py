"""How long the kernel of experts takes with other tiles than kernels/triton/experts.py has, and by
how much its results change.

    python benchmarks/gpu_tiles.py --kinds bf16,mxfp4 --tokens 1,8,64,2048,8192

Needs a GPU. Experts are random, in the shapes of Qwen3-30B-A3B (bf16) and gpt-oss-20b (mxfp4). A
row names the rows of a tile, rows of a weight, bytes of x in a block of columns, warps and stages.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
sys.path.append(str(ROOT / "runs" / "carried" / "packages"))  # see gpu_check.py

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402

from moe_infinity.gpu.kernels.packed import any_tile  # noqa: E402
from moe_infinity.gpu.kernels.packed_matrix import any_matrix  # noqa: E402
from moe_infinity.kernels.triton import experts  # noqa: E402
from moe_infinity.kernels.triton.slot_mlp import SlotMlp  # noqa: E402
from tests.kernels.triton.slot_experts import OF_GPT_OSS, Experts  # noqa: E402

Tiles = tuple[int, ...]
NAMES = ("TILE", "ROWS", "COLUMN_BYTES", "WARPS", "STAGES")
FEW = [
    (16, rows, columns, *others)
    for rows, columns, others in itertools.product(
        (16, 32, 64), (128, 256), ((4, 3), (4, 5), (2, 4), (8, 3))
    )
]
MANY = [
    (tile, rows, 128, warps, stages)
    for tile, rows, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (3, 4))
]
COMPILERS = 12  # processes


class Shape(NamedTuple):
    """Of an MoE layer."""

    width: int
    expert_width: int
    num_experts: int
    top_k: int
    options: dict[str, Any]


SHAPES = {
    "bf16": Shape(2048, 768, 128, 8, {}),
    "mxfp4": Shape(
        2880, 2880, 32, 4, {"act": OF_GPT_OSS, "is_interleaved": True, "has_bias": True}
    ),
}


class Layer:
    """Experts in slots on the GPU, and tokens for them."""

    def __init__(self, kind: str, num_tokens: int) -> None:
        shape = SHAPES[kind]
        found = Experts(
            kind, shape.width, shape.expert_width, num=2, matrix_of=any_matrix, **shape.options
        )
        self.mlp: SlotMlp = found.mlp
        self._slots = found.slots.repeat(shape.num_experts // 2, 1).cuda()
        num_bytes = self._slots.shape[1]
        pointers_E = self._slots.data_ptr() + num_bytes * torch.arange(shape.num_experts)
        index = torch.rand(num_tokens, shape.num_experts).argsort(dim=1)[:, : shape.top_k]
        self.index_TK = index.contiguous().cuda()
        self.num_bytes = num_bytes * len(index.unique())
        x_TD = torch.randn(num_tokens, shape.width, dtype=torch.bfloat16).cuda()
        weights_TK = torch.rand(num_tokens, shape.top_k, dtype=torch.bfloat16).cuda()
        out_PD = torch.empty(index.numel(), shape.width, dtype=torch.float32).cuda()
        self._given = x_TD, self.index_TK, weights_TK, pointers_E.cuda(), out_PD
        self.num_flops = 6 * index.numel() * shape.width * shape.expert_width

    def compute(self) -> Tensor:
        experts.compute_pairs(self.mlp, *self._given, load=any_tile)
        return self._given[-1]

    def plan(self, tile: int) -> None:
        experts._planned(self.index_TK, self._given[3], tile)


def use(tiles: Tiles) -> None:
    tile, *others = tiles
    for name, value in zip(NAMES[1:], others, strict=True):
        setattr(experts, name, value)
    experts.FEW_ROWS = experts.MANY_ROWS = tile


def compile_tiles(kind: str, share: list[Tiles]) -> None:
    """In a process of its own: Triton keeps what it has compiled on disk."""
    layer = Layer(kind, 1)
    for tiles in share:
        use(tiles)
        try:
            layer.compute()
        except Exception as error:  # too much shared memory, say
            print(f"  {tiles}: {str(error).splitlines()[0][:90]}")


def compile_all(kind: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    wanted = FEW + MANY
    shares = [(kind, wanted[first::COMPILERS]) for first in range(COMPILERS)]
    processes = [spawn.Process(target=compile_tiles, args=share) for share in shares]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def tried(layer: Layer, tiles: Tiles, expected: Tensor | None) -> tuple[float, Tensor]:
    """Microseconds, and what is computed."""
    use(tiles)
    found = layer.compute().clone()
    if expected is not None:
        apart = float((found - expected).norm() / expected.norm())
        assert apart < 1e-2, (tiles, apart)
    return 1e3 * triton.testing.do_bench(layer.compute, 5, 25, return_mode="median"), found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--kinds", default="bf16,mxfp4")
    parser.add_argument("--tokens", default="1,8,64,2048,8192")
    args = parser.parse_args()
    torch.manual_seed(0)
    stock = tuple(getattr(experts, name) for name in NAMES[1:])
    few, many, most = experts.FEW_ROWS, experts.MANY_ROWS, experts.MANY_PAIRS
    for kind in args.kinds.split(","):
        compile_all(kind)
        for num_tokens in map(int, args.tokens.split(",")):
            layer = Layer(kind, num_tokens)
            has_many = layer.index_TK.numel() > most
            now = (many if has_many else few, *stock)
            now_us, expected = tried(layer, now, None)
            found = []
            for tiles in MANY if has_many else FEW:
                with suppress(Exception):  # told above
                    found.append((tried(layer, tiles, expected)[0], tiles))
            plan_us = 1e3 * triton.testing.do_bench(partial(layer.plan, now[0]), 5, 25)
            print(
                f"{kind}, {num_tokens} tokens: {layer.num_bytes / 1e6:.0f} MB of experts, "
                f"{layer.num_flops / 1e9:.0f} GFLOP; plan {plan_us:.0f} us"
            )
            for us, tiles in [(now_us, now), *sorted(found)[:6]]:
                rates = f"{layer.num_bytes / us / 1e6:.2f} TB/s, {layer.num_flops / us / 1e6:.0f}"
                print(f"  {tiles!s:28}{us:9.1f} us  {rates} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
