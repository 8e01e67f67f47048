"""A model that loads an expert only when a layer asks for it, or when it is predicted."""

from __future__ import annotations

from typing import Any

# For tests that count hits, misses, loads or bytes, or that say which expert is read when. Every
# other test runs what ships: free slots fill in the background, long prompts stream their layers.
ON_DEMAND: dict[str, Any] = {"preload": "off", "stream_layers": False}
ON_DEMAND_FLAGS = ("--preload", "off", "--no-stream-layers")
