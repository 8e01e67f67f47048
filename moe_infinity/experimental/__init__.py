"""Code that has not met the hardware it is for; the core imports none of it."""
