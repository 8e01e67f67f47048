"""Arithmetic on a GPU, in Triton, and its reference."""
