"""What simulations, traces and runs look like: figures by matplotlib, and a page without it."""
