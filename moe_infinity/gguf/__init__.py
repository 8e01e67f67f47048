"""Models in GGUF files: what their keys and tensors are for transformers."""
