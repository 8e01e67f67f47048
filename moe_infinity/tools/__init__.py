"""Tools that look at traces, machines and runs; the core imports none of them."""
