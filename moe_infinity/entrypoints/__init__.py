"""Module names that scripts of the earlier MoE-Infinity use."""
