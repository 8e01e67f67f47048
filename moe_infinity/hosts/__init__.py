"""Experts on other hosts: processes that each compute a share of a model's experts."""
