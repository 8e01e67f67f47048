"""What to expect of a model on a machine, before it is loaded: `moe-infinity plan`."""
