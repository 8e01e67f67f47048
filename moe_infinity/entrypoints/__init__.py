"""Ways in that older scripts know."""
