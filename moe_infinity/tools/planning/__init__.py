"""Predicts a model's fit and speed on a machine before it is loaded: `moe-infinity plan`."""
