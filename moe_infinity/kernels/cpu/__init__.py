"""Arithmetic on a CPU, compiled by numba."""
