"""From a path or name of a model to a model without experts, and a plan of these."""
