"""Replays traces through the residency table and its policies. No torch."""
