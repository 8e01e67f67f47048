"""How we sit under transformers: finding experts in a model and in a checkpoint, and computing them
from slots.
"""
