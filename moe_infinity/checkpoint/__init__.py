"""What is on disk, and how it gets into a slot."""
