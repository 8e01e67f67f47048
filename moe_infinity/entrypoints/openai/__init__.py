"""The server, under the name it had in the earlier MoE-Infinity."""
