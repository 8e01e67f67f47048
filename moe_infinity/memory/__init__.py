"""Slots in host and device memory, and the copies that fill them."""
