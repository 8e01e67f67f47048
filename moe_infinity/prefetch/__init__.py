"""What will be activated next, and what to load ahead because of it. No torch."""
