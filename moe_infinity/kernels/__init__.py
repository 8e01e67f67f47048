"""The arithmetic of experts."""
