"""How fast a model runs here, beside the best that could be and beside llama.cpp."""
