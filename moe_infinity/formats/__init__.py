"""Formats of quantized weights, and the methods that pack them. A checkpoint has one or two."""
