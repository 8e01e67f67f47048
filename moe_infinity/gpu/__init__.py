"""The engine that lets a GPU decide a decode step and replay it as one graph."""
