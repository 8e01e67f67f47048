"""One MoE layer in one step, and where it computes."""
