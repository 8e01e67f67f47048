"""The experts of an MoE layer on a GPU: two products with an activation between them, for any
number of tokens. reference.py defines what the kernels compute.
"""

from importlib.util import find_spec


def has_triton() -> bool:
    """Return True if triton is installed: it comes with torch's CUDA builds for Linux."""
    return find_spec("triton") is not None
