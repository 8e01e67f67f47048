"""Random blocks of GGML's types, without a quantizer.

    random bytes -> scale fields that are valid and give mean 0 -> scales for the wanted size

The weights are uniform in each block, and blocks differ in size as those of a trained model do.
"""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

Blocks = NDArray[np.uint8]  # [blocks, bytes of a block]

SPREAD = (0.7, 1.3)  # of the sizes of blocks
K_QUANTS = (Type.Q4_K, Type.Q5_K, Type.Q6_K)  # which the gguf package cannot quantize to
SCALE_AT = {
    Type.Q8_0: 0, Type.Q4_0: 0, Type.Q5_0: 0, Type.Q5_1: 0, Type.Q4_K: 0, Type.Q5_K: 0,
    Type.Q6_K: 208,
}  # of a block: where its float16 scale is  # fmt: skip
# The scale of the minimum, which follows it: what makes the mean 0 where values begin at 0.
MINIMUM = {Type.Q4_K: 7.5, Type.Q5_K: 15.5, Type.Q5_1: -15.5}
SIX_BITS = (Type.Q4_K, Type.Q5_K)  # of the scale and the minimum of 32 weights
PLAIN = {Type.F32: np.float32, Type.F16: np.float16}
MXFP4_SIZE = 2.93  # root mean square of its 16 values
MXFP4_BIAS = 127


class RandomBlocks:
    """A pool of random blocks of one type, whose weights have a given standard deviation."""

    def __init__(self, kind: Type, num_blocks: int, seed: int) -> None:
        self._kind = kind
        self._random = np.random.default_rng(seed)
        self._blocks = self._bytes(num_blocks)
        self._factors = self._random.uniform(*SPREAD, num_blocks)
        if kind not in MINIMUM:
            self._factors *= self._random.choice([-1.0, 1.0], num_blocks)
        if kind in SCALE_AT:
            self._factors /= self._measured_size()

    def of_size(self, size: float) -> Blocks:
        """Return the pool with weights of standard deviation `size`."""
        if self._kind in SCALE_AT:
            self._set_scales(size)
            blocks: Blocks = self._blocks.copy()
            return blocks
        if self._kind == Type.MXFP4:
            return self._with_exponents(size)
        weights = size * self._random.standard_normal(len(self._blocks), np.float32)
        if self._kind == Type.BF16:
            blocks = gguf.quants.quantize(weights, Type.BF16).view(np.uint8).reshape(-1, 2)
        else:
            blocks = weights.astype(PLAIN[self._kind])[:, None].view(np.uint8)
        return blocks

    def _bytes(self, num_blocks: int) -> Blocks:
        _, num_bytes = gguf.GGML_QUANT_SIZES[self._kind]
        blocks = self._random.integers(0, 256, (num_blocks, num_bytes), dtype=np.uint8)
        if self._kind in SIX_BITS:
            blocks[:, 4:8] |= 0xA0  # scales of at least half the largest
            blocks[:, 8:12] = blocks[:, 4:8]  # the minima of the first four are as their scales,
            blocks[:, 12:16] = (blocks[:, 12:16] & 0xF) * 0x11  # and those of the others
        if self._kind == Type.Q6_K:
            scales = self._random.integers(64, 128, (num_blocks, 16), dtype=np.int8)
            signs = self._random.choice(np.array([-1, 1], np.int8), (num_blocks, 16))
            blocks[:, 192:208] = (scales * signs).view(np.uint8)
        return blocks

    def _measured_size(self) -> float:
        self._set_scales(1e-3)
        weights = gguf.quants.dequantize(self._blocks[:4096], self._kind)
        return float(np.sqrt(np.square(weights, dtype=np.float64).mean())) / 1e-3

    def _set_scales(self, size: float) -> None:
        scales = (size * self._factors).astype(np.float16)[:, None]
        if self._kind in MINIMUM:
            scales = np.hstack([scales, (MINIMUM[self._kind] * scales).astype(np.float16)])
        raw = scales.view(np.uint8)
        begin = SCALE_AT[self._kind]
        self._blocks[:, begin : begin + raw.shape[1]] = raw

    def _with_exponents(self, size: float) -> Blocks:
        """Two neighbouring powers of two, so that the mean of the squares is right."""
        wanted = size / MXFP4_SIZE
        low = int(np.floor(np.log2(wanted)))
        share = (wanted**2 / 4.0**low - 1) / 3
        blocks: Blocks = self._blocks.copy()
        blocks[:, 0] = MXFP4_BIAS + low + (self._random.random(len(blocks)) < share)
        return blocks
