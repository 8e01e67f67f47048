"""How fast a model runs here, beside the best that could be."""
