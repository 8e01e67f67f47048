"""How the classes of transformers call the engine."""
