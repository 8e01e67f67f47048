"""Writes a checkpoint whose experts take fewer bits: `moe-infinity pack`."""

from moe_infinity.quantize.pack import PackReport, pack_checkpoint

__all__ = ["PackReport", "pack_checkpoint"]
