"""Pictures of simulations, traces and runs: figures by matplotlib, and a page without it."""
