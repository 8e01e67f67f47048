"""Which experts will be needed: what requests activated, what follows from it. No torch."""
