"""The server, where it used to be started from."""
