"""The command line: `moe-infinity`."""
