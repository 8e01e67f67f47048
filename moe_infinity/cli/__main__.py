"""`python -m moe_infinity.cli` is `python -m moe_infinity`, under its name of earlier versions."""

from runpy import run_module

run_module("moe_infinity", run_name="__main__", alter_sys=True)
