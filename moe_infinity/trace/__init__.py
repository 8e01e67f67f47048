"""Which experts were activated: per request (EAM) and per token (trace). No torch."""
