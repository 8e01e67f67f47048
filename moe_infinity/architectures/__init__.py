"""Where transformers ends and this package begins."""
