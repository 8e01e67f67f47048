"""Checkpoints on disk, and how their bytes get into slots."""
