"""Freed memory goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
from pathlib import Path
from moe_infinity.system.memory import return_free_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

made = [bytes(1000) for _ in range(200_000)]
kept = made[-1]
del made
before = resident()
return_free_memory()
assert before - resident() > 150e6, (before, resident())
"""


COPIED = """
import sys
import torch
from transformers.cache_utils import DynamicCache
from moe_infinity.architectures.attention_inputs import with_room
from moe_infinity.system.machine import own_bytes

num_layers, width = map(int, sys.argv[1:])
torch.ones(24 << 20, dtype=torch.uint8)  # freed: from now on the C library keeps what is smaller
cache = DynamicCache()
for _ in range(2):  # passes of a prompt
    for layer_idx in range(num_layers):
        half = torch.ones(1, 1, 1024, width)
        cache.update(half, half, layer_idx)
before = own_bytes()
for layer in cache.layers:
    with_room(layer)
print(own_bytes() - before >> 20)
"""
on_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="others give it back or do not"
)

JOINED = """
import sys
import torch
from transformers.cache_utils import DynamicCache
from moe_infinity.architectures.attention_inputs import add_token, with_room
from moe_infinity.server.batch import DecodeBatch
from moe_infinity.system.machine import own_bytes

torch.ones(24 << 20, dtype=torch.uint8)  # freed: from now on the C library keeps what is smaller
batch = DecodeBatch()
def cache_of(num_tokens):
    cache = DynamicCache()
    for layer_idx in range(16):
        x = torch.ones(1, 1, num_tokens, 1024)
        cache.update(x, x, layer_idx)
    return cache
def decode():  # keys and values are where there is room for more
    for layer in batch.cache.layers:
        with_room(layer)
        add_token(layer)
    batch.grow()
for _ in range(3):
    batch.join(cache_of(1024), 1024)
decode()
alone = cache_of(1100)
for change in (lambda: batch.join(alone, 1100), lambda: batch.keep([0, 1])):
    before, num_bytes = own_bytes(), batch.num_bytes
    change()
    print(own_bytes() - before - (batch.num_bytes - num_bytes) >> 20)
    decode()
"""


@on_glibc
def test_freed_memory_goes_back_to_the_system():
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)


@on_glibc
@pytest.mark.parametrize(("num_layers", "width"), [(16, 2048), (128, 192)])
def test_what_a_cache_is_copied_from_is_given_back_layer_by_layer(num_layers, width):
    """512 and 384 MiB of keys and values are copied, and are never there twice."""
    command = [sys.executable, "-c", COPIED, str(num_layers), str(width)]
    done = subprocess.run(command, check=True, timeout=100, capture_output=True, text=True)
    assert int(done.stdout) < 100


@on_glibc
def test_what_a_batch_is_joined_from_is_given_back_layer_by_layer():
    """384 MiB of keys and values are copied to 550, then 275 of these, and none is there twice."""
    command = [sys.executable, "-c", JOINED]
    done = subprocess.run(command, check=True, timeout=100, capture_output=True, text=True)
    joined, kept = map(int, done.stdout.split())
    assert joined < 60
    assert kept < 60
