"""Images in prompts: read from files that nobody has to trust, and made what a model takes."""
