"""Writes a checkpoint whose experts take fewer bits: `moe-infinity pack`."""

from moe_infinity.packer.pack import PackReport, pack_checkpoint

__all__ = ["PackReport", "pack_checkpoint"]
