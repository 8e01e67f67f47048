"""Writes a checkpoint whose experts take fewer bits: `moe-infinity pack`."""
