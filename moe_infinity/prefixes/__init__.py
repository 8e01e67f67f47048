"""Beginnings of prompts: their keys, values and states, kept for prompts that begin alike.

saved.py            one file with one prefix, which its user names
kept.py             the prompt of a command that goes on from a folder of prefixes
prefix_cache.py     prefixes in memory, in a tree of blocks (prefix_tree.py)
prompt_store.py     the same on disk; stored_prefixes.py says which files a prompt needs
store_key.py        tells models and arithmetics apart
cache_bytes.py      parts of a cache as bytes, and back; cache_layers.py has the kinds of layers
continuing.py       whether a model can go on from a cache that was kept
lengths.py          which lengths of sequences a model computes alike
prompt_passes.py    computes a prompt in as many passes as memory asks for
"""
